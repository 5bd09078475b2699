#include "threadpool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace penstock {

namespace {

// Pauses before sleeping; one takes 20 to 50 ns. Waking a sleeper costs 50 us and more on a virtual machine.
constexpr int BARRIER_SPINS = 1000;  // the others are computing
constexpr int STEP_SPINS = 4000;     // the next step is being scheduled, or there is none

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void wait_while(std::atomic<uint32_t>& value, uint32_t old, int spins) {
    for (int i = 0; i < spins; i++) {
        if (value.load(std::memory_order_acquire) != old) return;
        pause();
    }
    value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int size) : size_(size) {
    for (int thread = 1; thread < size; thread++) threads_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
    stopping_ = true;
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    for (auto& thread : threads_) thread.join();
}

void ThreadPool::run(Job job, void* context) {
    job_ = job;
    context_ = context;
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    job(context, 0);
    barrier();
}

void ThreadPool::work(int thread) {
    for (uint32_t seen = 0;; seen++) {
        wait_while(epoch_, seen, STEP_SPINS);
        if (stopping_) return;
        job_(context_, thread);
        barrier();
    }
}

void ThreadPool::barrier() {
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        phase_.notify_all();
    } else {
        wait_while(phase_, phase, BARRIER_SPINS);
    }
}

}  // namespace penstock
