#include "threadpool.h"

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace penstock {

namespace {

// Pauses before sleeping; one takes 20 to 50 ns. Waking a sleeper costs 50 us and more on a virtual machine, so a
// phase outwaits what a gateway or client does between two tokens on the core of the thread that is late.
constexpr int PHASE_SPINS = 10000;
constexpr int STEP_SPINS = 10000;  // the next step is being scheduled, or there is none

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

template <class T>
void wait_while(std::atomic<T>& value, T old, int spins) {
    for (int i = 0; i < spins; i++) {
        if (value.load(std::memory_order_acquire) != old) return;
        pause();
    }
    value.wait(old, std::memory_order_acquire);
}

// Keep a thread on one of the CPUs this process may use, if there are as many as threads. The system would else put two
// of them on one core whenever another process takes the second, and leave them there, one waiting for the other at each
// barrier, long after that has gone back to sleep.
void pin(int thread, int threads) {
#if defined(__linux__)
    cpu_set_t usable, one;
    if (sched_getaffinity(0, sizeof usable, &usable) != 0 || CPU_COUNT(&usable) != threads) return;
    for (int cpu = 0, number = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &usable) || number++ != thread) continue;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        sched_setaffinity(0, sizeof one, &one);  // of the calling thread; where it is refused nothing is lost but speed
        return;
    }
#endif
}

}  // namespace

void WorkCounter::reset() {
    next_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
}

void WorkCounter::finish(int done, int items) {
    if (done && done_.fetch_add(done, std::memory_order_acq_rel) + done == items) {
        done_.notify_all();
        return;
    }
    for (int seen; (seen = done_.load(std::memory_order_acquire)) != items;) wait_while(done_, seen, PHASE_SPINS);
}

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

void ThreadPool::pin_caller() const { pin(0, size_); }

void ThreadPool::work(int thread) {
    pin(thread, size_);
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
        wait_while(phase_, phase, PHASE_SPINS);
    }
}

}  // namespace penstock
