// What the loops of this folder share.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr double NOTHING = -1e30;  // the score of no token, as in aggregates.py

template <class F> void share(int64_t count, int64_t threads, F work) {
  threads = threads < count ? threads : count;
  std::vector<std::thread> others;
  for (int64_t i = 1; i < threads; ++i) others.emplace_back(work, count * i / threads, count * (i + 1) / threads);
  work(0, threads > 1 ? count / threads : count);
  for (auto& other : others) other.join();
}

inline double exponential(double x) { return std::exp(x); }

// Within 2 units in the last place, without branches, so that the compiler computes many at a time.
inline float exponential(float x) {
  x = x < -87.f ? -87.f : x > 88.f ? 88.f : x;
  const int32_t n = int32_t(x * 1.44269504f + (x < 0 ? -.5f : .5f));
  const float r = (x - n * .693359375f) + n * 2.12194440e-4f;
  float y = 1.98756915e-4f;
  y = y * r + 1.39819995e-3f, y = y * r + 8.33345192e-3f, y = y * r + 4.16657964e-2f;
  y = y * r + .166666655f, y = y * r + .5f, y = y * r * r + r + 1;
  const int32_t bits = (n + 127) * (1 << 23);
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return y * power;
}

template <class T> inline T sigmoid(T x) { return 1 / (1 + exponential(-x)); }

template <class T> T dot(const T* x, const T* y, int64_t width) {  // in eight sums, which the compiler computes at a time
  T sums[8] = {}, sum = 0;
  int64_t i = 0;
  for (; i + 8 <= width; i += 8)
    for (int64_t j = 0; j < 8; ++j) sums[j] += x[i + j] * y[i + j];
  for (; i < width; ++i) sum += x[i] * y[i];
  for (T part : sums) sum += part;
  return sum;
}

}  // namespace
