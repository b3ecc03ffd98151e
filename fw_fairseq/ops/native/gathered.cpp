// A sparse feed-forward layer for few tokens on a CPU: each weight that counts is read once, as a contiguous row, and the rest of both
// matrices is not touched. modules/sparse/gathered.py and fused.py call these loops and say what they compute.
#include "products.h"

namespace {

struct Norm {
  const void *weight, *bias;
  double eps;
};

struct FeedForward {  // with ReLU; units of the recurrence beside it: 0 where there are none
  const void *x, *inner, *outer, *controller_bias, *in, *out, *bias;
  const void *down, *down_bias, *gates, *gates_bias, *up, *up_bias;
  void *cell, *y;
  Norm norm, recurrent_norm;
  int64_t rows, width, rank, units, block, recurrent, threads;
};

template <class T> const T* of(const void* p) { return static_cast<const T*>(p); }

// The unit that each token x (rows, width) chooses of each block, and its hidden value. inner (rows, rank) is the workers' common
// memory. Eight blocks are read at the same time.
template <class T>
void choose(const Worker& worker, const FeedForward& a, const Sum<T>* x, Sum<T>* inner, int64_t* chosen, T* hidden) {
  const int64_t rows = a.rows, width = a.width, rank = a.rank, block = a.block, blocks = a.units / block;
  const auto [start, stop] = worker.part(rank);
  products<T>(x, rows, width, start, stop, of<T>(a.inner), [&](int64_t o, int64_t r, Sum<T> sum) { inner[r * rank + o] = sum; });
  worker.meet();
  const T *bias = of<T>(a.controller_bias), *B = of<T>(a.outer), *W = of<T>(a.in);
  const auto [first, last] = worker.part(blocks);
  std::vector<Sum<T>> best(rows * blocks);
  for (int64_t b = first; b < last; b += ROWS) {
    const auto block_of = [=, last = last](uint64_t i) { return b + int64_t(i % ROWS) < last ? b + int64_t(i % ROWS) : last - 1; };
    const auto row = [=](uint64_t i) { return B + (block_of(i) * block + int64_t(i / ROWS)) * rank; };
    products_at<T>(inner, rows, rank, 0, ROWS * block, row, [&](uint64_t i, int64_t r, Sum<T> sum) {
      const int64_t place = r * blocks + block_of(i), unit = block_of(i) * block + int64_t(i / ROWS);
      const Sum<T> logit = sum + wide(bias[unit]);
      if (i < ROWS || logit > best[place]) best[place] = logit, chosen[place] = unit;
    });
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t* units = chosen + r * blocks;
    products_at<T>(x + r * width, 1, width, first, last, [=](int64_t b) { return W + units[b] * width; },
                   [=](int64_t b, int64_t, Sum<T> sum) { narrow(sum, hidden + r * blocks + b); });
  }
}

// y (last - first) = the bias and the sum of the chosen units' rows of W, each times its hidden value, in these columns. A unit that
// is 0 is not read.
template <class T>
void sum_units(const T* hidden, const int64_t* chosen, const T* W, const T* bias, int64_t blocks, int64_t width, int64_t first,
               int64_t last, Sum<T>* y) {
  std::vector<Sum<T>> weights;
  std::vector<const T*> rows;
  for (int64_t b = 0; b < blocks; ++b)
    if (wide(hidden[b]) != 0) weights.push_back(wide(hidden[b])), rows.push_back(W + chosen[b] * width + first);
  for (int64_t j = first; j < last; ++j) y[j - first] = wide(bias[j]);
  add_rows(y, weights.data(), rows.data(), rows.size(), last - first);
}

// The norm, or x itself where there are no weights.
template <class T> void normed(const T* x, int64_t width, const Norm& norm, Sum<T>* y) {
  constexpr int64_t N = 8;  // sums at a time
  for (int64_t i = 0; i < width; ++i) y[i] = wide(x[i]);
  if (!norm.weight) return;
  const auto total = [&](auto value) {
    double sums[N] = {}, sum = 0;
    int64_t i = 0;
    for (; i + N <= width; i += N)
      for (int64_t j = 0; j < N; ++j) sums[j] += value(y[i + j]);
    for (; i < width; ++i) sum += value(y[i]);
    for (double part : sums) sum += part;
    return sum;
  };
  const double mean = total([](double value) { return value; }) / width;
  const double square = total([=](double value) { return (value - mean) * (value - mean); });
  const double scale = 1 / std::sqrt(square / width + norm.eps);
  for (int64_t i = 0; i < width; ++i) y[i] = Sum<T>((y[i] - mean) * scale) * wide(of<T>(norm.weight)[i]) + wide(of<T>(norm.bias)[i]);
}

// y (rows, width) = what the recurrent units add.
template <class T> void recur(const FeedForward& a, Sum<T>* y) {
  const int64_t rows = a.rows, C = a.width, n = a.recurrent;
  std::vector<Sum<T>> x(rows * C), inner(rows * n), u(rows * 3 * n), h(rows * n);
  for (int64_t r = 0; r < rows; ++r) normed(of<T>(a.x) + r * C, C, a.recurrent_norm, &x[r * C]);
  const auto linear = [&](const Sum<T>* in, int64_t width, const void* weight, const void* bias, int64_t outputs, Sum<T>* out) {
    products<T>(in, rows, width, 0, outputs, of<T>(weight),
                [=](int64_t o, int64_t r, Sum<T> sum) { out[r * outputs + o] = sum + wide(of<T>(bias)[o]); });
  };
  linear(x.data(), C, a.down, a.down_bias, n, inner.data());
  linear(inner.data(), n, a.gates, a.gates_bias, 3 * n, u.data());
  Sum<T>* cells = static_cast<Sum<T>*>(a.cell);
  const Sum<T> scale = std::sqrt(Sum<T>(3));
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < n; ++i) {
      const Sum<T>*gates = &u[r * 3 * n + i], passed = scale * inner[r * n + i];
      Sum<T>& cell = cells[r * n + i];
      cell = gates[0] + sigmoid(gates[n]) * (cell - gates[0]);
      h[r * n + i] = passed + sigmoid(gates[2 * n]) * (cell - passed);
    }
  linear(h.data(), n, a.up, a.up_bias, C, y);
}

template <class T> void feed(const FeedForward& a) {
  const int64_t rows = a.rows, C = a.width, blocks = a.units / a.block;
  std::vector<Sum<T>> inner(rows * a.rank), recurrent(a.recurrent ? rows * C : 0);
  std::vector<int64_t> chosen(rows * blocks);
  std::vector<T> hidden(rows * blocks);
  together(a.threads, [&](const Worker& worker) {
    std::vector<Sum<T>> x(rows * C);
    for (int64_t r = 0; r < rows; ++r) normed(of<T>(a.x) + r * C, C, a.norm, &x[r * C]);
    choose<T>(worker, a, x.data(), inner.data(), chosen.data(), hidden.data());
    if (a.recurrent && worker.follows()) recur<T>(a, recurrent.data());
    worker.meet();
    const auto [first, last] = worker.part(C, 64);
    for (int64_t r = 0; r < rows; ++r) {
      std::vector<T> active(hidden.begin() + r * blocks, hidden.begin() + (r + 1) * blocks);
      for (T& unit : active)
        if (wide(unit) < 0) narrow(Sum<T>(0), &unit);
      sum_units<T>(active.data(), &chosen[r * blocks], of<T>(a.out), of<T>(a.bias), blocks, C, first, last, x.data());
      T* y = static_cast<T*>(a.y) + r * C;
      for (int64_t i = first; i < last; ++i) narrow(x[i - first] + (a.recurrent ? recurrent[r * C + i] : 0), y + i);
    }
  });
}

// sizes: rows, width, rank, units, block, threads. A (rank, width), B (units, rank), W (units, width).
template <class T>
void choose_alone(const T* x, const T* A, const T* B, const T* bias, const T* W, int64_t* chosen, T* hidden, const int64_t* sizes) {
  FeedForward a{};
  a.inner = A, a.outer = B, a.controller_bias = bias, a.in = W;
  a.rows = sizes[0], a.width = sizes[1], a.rank = sizes[2], a.units = sizes[3], a.block = sizes[4];
  const std::vector<Sum<T>> in = widened(x, a.rows * a.width);
  std::vector<Sum<T>> inner(a.rows * a.rank);
  together(sizes[5], [&](const Worker& worker) { choose<T>(worker, a, in.data(), inner.data(), chosen, hidden); });
}

// sizes: rows, width, blocks, threads. W (units, width).
template <class T> void sum(const T* hidden, const int64_t* chosen, const T* W, const T* bias, T* y, const int64_t* sizes) {
  const int64_t rows = sizes[0], width = sizes[1], blocks = sizes[2];
  together(sizes[3], [=](const Worker& worker) {
    const auto [first, last] = worker.part(width, 64);
    std::vector<Sum<T>> total(last - first);
    for (int64_t r = 0; r < rows; ++r) {
      sum_units<T>(hidden + r * blocks, chosen + r * blocks, W, bias, blocks, width, first, last, total.data());
      for (int64_t j = first; j < last; ++j) narrow(total[j - first], y + r * width + j);
    }
  });
}

}  // namespace

#define EXPORT(T, name)                                                                                                              \
  extern "C" void choose_##name(const T* x, const T* A, const T* B, const T* bias, const T* W, int64_t* chosen, T* hidden,           \
                                const int64_t* sizes) {                                                                              \
    choose_alone<T>(x, A, B, bias, W, chosen, hidden, sizes);                                                                        \
  }                                                                                                                                  \
  extern "C" void sum_##name(const T* hidden, const int64_t* chosen, const T* W, const T* bias, T* y, const int64_t* sizes) {        \
    sum<T>(hidden, chosen, W, bias, y, sizes);                                                                                       \
  }                                                                                                                                  \
  extern "C" void feed_##name(const FeedForward* a) { feed<T>(*a); }
EXPORT(float, float)
EXPORT(double, double)
EXPORT(Half, bfloat16)
