// Persistent threads that run one function together (the caller is thread 0) and meet at barriers inside it.
//
// A step of a 30-layer model has about 200 barriers, so waiting spins first (about a microsecond when the threads are
// in step) and sleeps on a futex after some 300 microseconds: an idle pool burns no CPU.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

namespace penstock {

class ThreadPool {
  public:
    using Job = void (*)(void* context, int thread);

    explicit ThreadPool(int size);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return size_; }

    // Returns when every thread has returned from the job. One caller at a time.
    void run(Job job, void* context);

    template <class F>
    void run(const F& job) {
        run([](void* context, int thread) { (*static_cast<const F*>(context))(thread); }, const_cast<F*>(&job));
    }

    // The other threads keep to CPUs of their own where there are enough; this does it for the thread that will call run.
    void pin_caller() const;

    // Inside a job, called by all threads: what each wrote before is visible to all after.
    void barrier();

  private:
    void work(int thread);

    const int size_;
    Job job_ = nullptr;
    void* context_ = nullptr;
    bool stopping_ = false;
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    std::vector<std::thread> threads_;
};

// Hands out indices of one phase to whoever is free.
struct alignas(64) WorkCounter {
    std::atomic<int> next{0};
    int take() { return next.fetch_add(1, std::memory_order_relaxed); }
};

}  // namespace penstock
