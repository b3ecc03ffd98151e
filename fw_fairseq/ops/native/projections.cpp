// Products of multiplicative layers and of convolutions for few tokens on a CPU: each weight is read once, for all modules.
// modules/sparse/gathered.py and fused.py call these loops and say what they compute.
#include "products.h"

namespace {

// y (vectors, width) = each row of x times the rows of gains.
template <class T> std::vector<Sum<T>> gained(const T* x, int64_t rows, const T* gains, int64_t modules, int64_t width) {
  std::vector<Sum<T>> y(rows * modules * width);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t m = 0; m < modules; ++m) {
      Sum<T>* out = &y[(r * modules + m) * width];
      for (int64_t i = 0; i < width; ++i) out[i] = wide(x[r * width + i]) * wide(gains[m * width + i]);
    }
  return y;
}

// y[i] = W (x * gains[i]) + bias for several rows of gains, or y[i] = W x[i] where there are none.
// sizes: rows, width, outputs, outputs of y in all, threads. W (outputs, width), y (rows, outputs), cut where y ends.
template <class T> void few(const T* x, const T* gains, const T* W, const T* bias, T* y, const int64_t* sizes) {
  const int64_t rows = sizes[0], width = sizes[1], outputs = sizes[2], end = sizes[3];
  const std::vector<Sum<T>> in = gains ? gained(x, 1, gains, rows, width) : widened(x, rows * width);
  share(outputs, sizes[4], [&](int64_t first, int64_t last) {
    products<T>(in.data(), rows, width, first, last, W, [=](int64_t o, int64_t r, Sum<T> sum) {
      const int64_t place = r * outputs + o;
      if (place < end) narrow(sum + (bias ? wide(bias[place]) : 0), y + place);
    });
  });
}

// One projection of a layer, in a row of modules/sparse/fused.py. sides: modules that a convolution reads; 0: dense rows that read p.
struct Part {
  const void* weight;
  int64_t size, sides;
};

struct Projections {
  const void *x, *gains, *weight, *bias, *out_bias;
  void *before, *y;  // before (rows, 2 width): the two tokens before, and afterwards the token and the one before it
  const Part* parts;
  int64_t count, rows, width, modules, outputs, threads;
};

// (rows, modules, sides, 3, width / modules): what a convolution reads of source (rows, 3, width), with 0 beyond the modules.
template <class S> std::vector<S> around(const std::vector<S>& source, const Projections& a, int64_t sides) {
  const int64_t M = a.modules, c = a.width / M;
  std::vector<S> y(a.rows * M * sides * 3 * c);
  S* out = y.data();
  for (int64_t r = 0; r < a.rows; ++r)
    for (int64_t m = 0; m < M; ++m)
      for (int64_t side = 0; side < sides; ++side)
        for (int64_t tap = 0; tap < 3; ++tap, out += c) {
          const int64_t other = m + side - sides / 2;
          if (other >= 0 && other < M) std::memcpy(out, &source[(r * 3 + tap) * a.width + other * c], c * sizeof(S));
        }
  return y;
}

// Where the outputs of each module of each row begin, (rows, modules).
inline std::vector<int64_t> starts(const Projections& a, int64_t row, int64_t module) {
  std::vector<int64_t> found;
  for (int64_t r = 0; r < a.rows; ++r)
    for (int64_t m = 0; m < a.modules; ++m) found.push_back(r * row + m * module);
  return found;
}

template <class T> void convolve(const Worker& worker, const Projections& a, const std::vector<Sum<T>>& source) {
  const int64_t M = a.modules, C = a.width;
  const T* bias = static_cast<const T*>(a.out_bias);
  T* y = static_cast<T*>(a.y);
  std::vector<Sum<T>> read[2];  // for one side and for three
  for (int64_t n = 0, start = 0; n < a.count; start += a.parts[n++].size) {
    const Part& part = a.parts[n];
    const T* W = static_cast<const T*>(part.weight);
    const auto give = [=](int64_t row, int64_t place, Sum<T> sum) {
      narrow(sum + (bias ? wide(bias[place]) : 0), y + row + place);
    };
    if (!part.sides) {
      const auto [first, last] = worker.part(part.size);
      for (int64_t r = 0; r < a.rows; ++r)
        products<T>(&source[r * 3 * C], 1, C, first, last, W,
                    [=](int64_t o, int64_t, Sum<T> sum) { give(r * a.outputs, start + o, sum); });
      continue;
    }
    std::vector<Sum<T>>& in = read[part.sides > 1];
    if (in.empty()) in = around(source, a, part.sides);
    const int64_t outputs = part.size / M;
    const auto [first, last] = worker.part(outputs);
    const std::vector<int64_t> rows = starts(a, a.outputs, 0), modules = starts(a, 0, outputs);
    products<T>(in.data(), a.rows * M, part.sides * 3 * (C / M), first, last, W,
                [&](int64_t o, int64_t i, Sum<T> sum) { give(rows[i], start + modules[i] + o, sum); });
  }
}

template <class T> void project(const Projections& a) {
  const int64_t C = a.width, M = a.modules, c = C / M;
  const std::vector<Sum<T>> scaled = gained(static_cast<const T*>(a.x), a.rows, static_cast<const T*>(a.gains), M, C);
  std::vector<Sum<T>> source(a.rows * 3 * C);
  T* before = static_cast<T*>(a.before);
  const T *P = static_cast<const T*>(a.weight), *bias = static_cast<const T*>(a.bias);
  for (int64_t r = 0; r < a.rows; ++r)
    for (int64_t i = 0; i < 2 * C; ++i) source[(3 * r + 1) * C + i] = wide(before[2 * r * C + i]);
  together(a.threads, [&](const Worker& worker) {
    const auto [first, last] = worker.part(c);
    const std::vector<int64_t> places = starts(a, 3 * C, c), modules = starts(a, 0, c);
    products<T>(scaled.data(), a.rows * M, C, first, last, P,
                [&](int64_t o, int64_t i, Sum<T> sum) { source[places[i] + o] = sum + wide(bias[modules[i] + o]); });
    worker.meet();
    convolve<T>(worker, a, source);
  });
  for (int64_t r = 0; r < a.rows; ++r)
    for (int64_t i = 0; i < 2 * C; ++i) narrow(source[3 * r * C + i], before + 2 * r * C + i);
}

}  // namespace

#define EXPORT(T, name)                                                                                                              \
  extern "C" void few_##name(const T* x, const T* gains, const T* W, const T* bias, T* y, const int64_t* sizes) {                    \
    few<T>(x, gains, W, bias, y, sizes);                                                                                             \
  }                                                                                                                                  \
  extern "C" void project_##name(const Projections* a) { project<T>(*a); }
EXPORT(float, float)
EXPORT(double, double)
EXPORT(Half, bfloat16)
