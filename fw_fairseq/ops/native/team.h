// Threads that do one piece of work together and meet between its parts.
#pragma once
#include <atomic>

#include "common.h"

namespace {

class Worker {
 public:
  struct Range {
    int64_t first, last;
  };
  Worker(std::atomic<int64_t>& met, int64_t index, int64_t threads) : met_(met), index_(index), threads_(threads) {}
  bool follows() const { return index_ == threads_ - 1; }
  Range part(int64_t count, int64_t grain = 1) const {  // this worker's, in whole grains but for the end
    const int64_t grains = (count + grain - 1) / grain, last = grains * (index_ + 1) / threads_ * grain;
    return {grains * index_ / threads_ * grain, last < count ? last : count};
  }
  void meet() const {  // nobody goes on before all are here
    if (threads_ == 1) return;
    const int64_t all = (met_.fetch_add(1) / threads_ + 1) * threads_;
    while (met_.load(std::memory_order_acquire) < all) std::this_thread::yield();
  }

 private:
  std::atomic<int64_t>& met_;
  const int64_t index_, threads_;
};

template <class F> void together(int64_t threads, F work) {
  std::atomic<int64_t> met{0};
  std::vector<std::thread> others;
  for (int64_t i = 1; i < threads; ++i) others.emplace_back([&, i] { work(Worker(met, i, threads)); });
  work(Worker(met, 0, threads));
  for (auto& other : others) other.join();
}

}  // namespace
