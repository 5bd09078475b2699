// Persistent threads that run one function together (the caller is thread 0).
//
// A step of a 30-layer model has about 200 phases, so waiting spins first (about a microsecond when the threads are
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

  private:
    void work(int thread);
    void barrier();

    const int size_;
    Job job_ = nullptr;
    void* context_ = nullptr;
    bool stopping_ = false;
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    std::vector<std::thread> threads_;
};

// Hands out the items of one phase to whoever is free, and knows when all are done.
class alignas(64) WorkCounter {
  public:
    void reset();
    int take() { return next_.fetch_add(1, std::memory_order_relaxed); }
    bool all_done(int items) const { return done_.load(std::memory_order_acquire) == items; }

    // Called by each thread that finds nothing left, with the number it has done. Returns when all items are done: what
    // any thread wrote for them is visible then.
    void finish(int done, int items);

  private:
    std::atomic<int> next_{0};
    std::atomic<int> done_{0};
};

}  // namespace penstock
