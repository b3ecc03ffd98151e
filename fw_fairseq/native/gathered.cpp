// The products of a sparse feed-forward layer for few tokens on a CPU. ops/sparse/gathered.py
// calls them and says what they compute.
// Each weight that counts is read once, as a contiguous row; the rest of both matrices is not touched.
#include "common.h"

namespace {

struct Half {  // bfloat16: the upper half of a float
  uint16_t bits;
};

inline double wide(double x) { return x; }
inline float wide(float x) { return x; }
inline float wide(Half x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

inline void narrow(double x, double* out) { *out = x; }
inline void narrow(float x, float* out) { *out = x; }
inline void narrow(float x, Half* out) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  out->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T> struct Accumulator { using type = float; };
template <> struct Accumulator<double> { using type = double; };
template <class T> using Sum = typename Accumulator<T>::type;

template <class S> struct Pack {  // 64 bytes of sums, which compilers for any processor split as they need
  static constexpr int64_t size = 64 / sizeof(S);
  typedef S type __attribute__((vector_size(64)));
};

template <class T> inline typename Pack<T>::type load(const T* p) {
  typename Pack<T>::type v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Pack<float>::type load(const Half* p) {
  typedef uint16_t Halves __attribute__((vector_size(32)));
  typedef uint32_t Words __attribute__((vector_size(64)));
  Halves halves;
  std::memcpy(&halves, p, sizeof halves);
  const Words words = __builtin_convertvector(halves, Words) << 16;
  Pack<float>::type v;
  std::memcpy(&v, &words, sizeof v);
  return v;
}

template <class T> inline void fetch(const T* p) { __builtin_prefetch(p); }

// The product of x and a row; the row ``next`` is brought near meanwhile.
template <class T> Sum<T> dot(const Sum<T>* x, const T* row, int64_t width, const T* next = nullptr) {
  constexpr int64_t N = Pack<Sum<T>>::size;
  typename Pack<Sum<T>>::type a = {}, b = {}, c = {}, d = {};
  int64_t i = 0;
  for (; i + 4 * N <= width; i += 4 * N) {
    if (next)
      for (int64_t j = 0; j < 4 * N; j += 64 / sizeof(T)) fetch(next + i + j);
    a += load(x + i) * load(row + i), b += load(x + i + N) * load(row + i + N);
    c += load(x + i + 2 * N) * load(row + i + 2 * N), d += load(x + i + 3 * N) * load(row + i + 3 * N);
  }
  for (; i + N <= width; i += N) a += load(x + i) * load(row + i);
  a += b + (c + d);
  Sum<T> total = 0;
  for (int64_t j = 0; j < N; ++j) total += a[j];
  for (; i < width; ++i) total += x[i] * wide(row[i]);
  return total;
}

// y += weight row
template <class T> void add(Sum<T>* y, Sum<T> weight, const T* row, int64_t width, const T* next) {
  constexpr int64_t N = Pack<Sum<T>>::size;
  int64_t i = 0;
  for (; i + N <= width; i += N) {
    fetch(next + i);
    const typename Pack<Sum<T>>::type sum = load(y + i) + weight * load(row + i);
    std::memcpy(y + i, &sum, sizeof sum);
  }
  for (; i < width; ++i) y[i] += weight * wide(row[i]);
}

template <class T> std::vector<Sum<T>> widened(const T* x, int64_t count) {
  std::vector<Sum<T>> y(count);
  for (int64_t i = 0; i < count; ++i) y[i] = wide(x[i]);
  return y;
}

// sizes: rows, width, rank, units, block, threads. A (rank, width), B (units, rank), W (units, width).
template <class T>
void choose(const std::vector<Sum<T>>& in, const T* A, const T* B, const T* bias, const T* W, int64_t* chosen, T* hidden,
            const int64_t* sizes) {
  const int64_t rows = sizes[0], width = sizes[1], rank = sizes[2], units = sizes[3], block = sizes[4], blocks = units / block;
  std::vector<Sum<T>> inner(rows * rank);
  share(rank, sizes[5], [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      for (int64_t r = 0; r < rows; ++r) inner[r * rank + i] = dot(&in[r * width], A + i * width, width);
  });
  share(blocks, sizes[5], [&](int64_t first, int64_t last) {
    std::vector<Sum<T>> best(rows);
    for (int64_t b = first; b < last; ++b)
      for (int64_t i = b * block; i < (b + 1) * block; ++i)
        for (int64_t r = 0; r < rows; ++r) {
          const Sum<T> logit = dot(&inner[r * rank], B + i * rank, rank) + wide(bias[i]);
          if (i == b * block || logit > best[r]) best[r] = logit, chosen[r * blocks + b] = i;
        }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t b = first; b < last; ++b) {
        const int64_t *unit = chosen + r * blocks + b, after = b + 1 < last ? unit[1] : *unit;
        narrow(dot(&in[r * width], W + *unit * width, width, W + after * width), hidden + r * blocks + b);
      }
  });
}

// sizes: rows, width, blocks, threads. W (units, width). A unit that is 0 is not read.
template <class T> void sum(const T* hidden, const int64_t* chosen, const T* W, const T* bias, T* y, const int64_t* sizes) {
  const int64_t rows = sizes[0], width = sizes[1], blocks = sizes[2];
  share(width, sizes[3], [&](int64_t first, int64_t last) {
    std::vector<Sum<T>> total(last - first);
    std::vector<int64_t> active(blocks);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t j = first; j < last; ++j) total[j - first] = wide(bias[j]);
      int64_t read = 0;  // units that are not 0
      for (int64_t b = 0; b < blocks; ++b)
        if (wide(hidden[r * blocks + b]) != 0) active[read++] = b;
      for (int64_t i = 0; i < read; ++i) {
        const int64_t *units = chosen + r * blocks, unit = units[active[i]], after = units[active[i + 1 < read ? i + 1 : i]];
        add(total.data(), wide(hidden[r * blocks + active[i]]), W + unit * width + first, last - first, W + after * width + first);
      }
      for (int64_t j = first; j < last; ++j) narrow(total[j - first], y + r * width + j);
    }
  });
}

// y[i] = W (x * gains[i]) + bias for several rows of gains, or y[i] = W x[i] where there are none; each row of W is read once.
// sizes: rows, width, outputs, outputs of y in all, threads. W (outputs, width), y (rows, outputs), cut where y ends.
template <class T> void few(const T* x, const T* gains, const T* W, const T* bias, T* y, const int64_t* sizes) {
  const int64_t rows = sizes[0], width = sizes[1], outputs = sizes[2], end = sizes[3];
  std::vector<Sum<T>> in = widened(x, gains ? width : rows * width);
  if (gains) {
    std::vector<Sum<T>> scaled(rows * width);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < width; ++i) scaled[r * width + i] = in[i] * wide(gains[r * width + i]);
    in.swap(scaled);
  }
  share(outputs, sizes[4], [&](int64_t first, int64_t last) {
    for (int64_t o = first; o < last; ++o)
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t place = r * outputs + o;
        if (place < end) narrow(dot(&in[r * width], W + o * width, width) + (bias ? wide(bias[place]) : 0), y + place);
      }
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

template <class T> void project_row(const Projections& a, int64_t r) {
  const int64_t C = a.width, S = a.modules, c = C / S;
  const std::vector<Sum<T>> x = widened(static_cast<const T*>(a.x) + r * C, C);
  std::vector<Sum<T>> source(3 * C), scaled(S * C), around(S * 9 * c), own(S * 3 * c), out(a.outputs);
  T* before = static_cast<T*>(a.before) + r * 2 * C;
  const T *gains = static_cast<const T*>(a.gains), *P = static_cast<const T*>(a.weight), *bias = static_cast<const T*>(a.bias);
  for (int64_t i = 0; i < S * C; ++i) scaled[i] = x[i % C] * wide(gains[i]);
  for (int64_t i = 0; i < 2 * C; ++i) source[C + i] = wide(before[i]);
  share(c, a.threads, [&](int64_t first, int64_t last) {
    for (int64_t o = first; o < last; ++o)
      for (int64_t s = 0; s < S; ++s) source[s * c + o] = dot(&scaled[s * C], P + o * C, C) + wide(bias[s * c + o]);
  });
  for (int64_t s = 0; s < S; ++s)
    for (int64_t tap = 0; tap < 3; ++tap)
      for (int64_t i = 0; i < c; ++i) {
        const Sum<T> value = source[tap * C + s * c + i];
        own[(s * 3 + tap) * c + i] = value;
        for (int64_t side = 0; side < 3; ++side) {
          const int64_t reader = s + 1 - side;
          if (reader >= 0 && reader < S) around[((reader * 3 + side) * 3 + tap) * c + i] = value;
        }
      }
  for (int64_t n = 0, start = 0; n < a.count; start += a.parts[n++].size) {
    const Part& part = a.parts[n];
    const T* W = static_cast<const T*>(part.weight);
    const int64_t rows = part.sides ? part.size / S : part.size, length = 3 * c * part.sides;
    const Sum<T>* read = part.sides == 1 ? own.data() : around.data();
    share(rows, part.sides ? a.threads : 1, [&](int64_t first, int64_t last) {
      for (int64_t o = first; o < last; ++o)
        if (part.sides)
          for (int64_t s = 0; s < S; ++s) out[start + s * rows + o] = dot(read + s * length, W + o * length, length);
        else
          out[start + o] = dot(source.data(), W + o * C, C);
    });
  }
  for (int64_t i = 0; i < 2 * C; ++i) narrow(source[i], before + i);
  const T* out_bias = static_cast<const T*>(a.out_bias);
  for (int64_t i = 0; i < a.outputs; ++i)
    narrow(out[i] + (out_bias ? wide(out_bias[i]) : 0), static_cast<T*>(a.y) + r * a.outputs + i);
}

struct Norm {
  const void *weight, *bias;
  double eps;
};

// The norm, or x itself where there are no weights.
template <class T> std::vector<Sum<T>> normed(const T* x, int64_t width, const Norm& norm) {
  std::vector<Sum<T>> y = widened(x, width);
  if (!norm.weight) return y;
  double mean = 0, square = 0;
  for (int64_t i = 0; i < width; ++i) mean += y[i];
  mean /= width;
  for (int64_t i = 0; i < width; ++i) square += (y[i] - mean) * (y[i] - mean);
  const double scale = 1 / std::sqrt(square / width + norm.eps);
  const T *weight = static_cast<const T*>(norm.weight), *bias = static_cast<const T*>(norm.bias);
  for (int64_t i = 0; i < width; ++i) y[i] = Sum<T>((y[i] - mean) * scale) * wide(weight[i]) + wide(bias[i]);
  return y;
}

struct FeedForward {  // with ReLU; units of the recurrence beside it: 0 where there are none
  const void *x, *inner, *outer, *controller_bias, *in, *out, *bias;
  const void *down, *down_bias, *gates, *gates_bias, *up, *up_bias;
  void *cell, *y;
  Norm norm, recurrent_norm;
  int64_t rows, width, rank, units, block, recurrent, threads;
};

template <class T> void recur(const FeedForward& a, int64_t r, std::vector<Sum<T>>& y) {
  const int64_t C = a.width, n = a.recurrent;
  const std::vector<Sum<T>> x = normed(static_cast<const T*>(a.x) + r * C, C, a.recurrent_norm);
  auto product = [&](const std::vector<Sum<T>>& in, const void* weight, const void* bias, int64_t outputs) {
    std::vector<Sum<T>> found(outputs);
    for (int64_t o = 0; o < outputs; ++o)
      found[o] = dot(in.data(), static_cast<const T*>(weight) + o * in.size(), in.size()) + wide(static_cast<const T*>(bias)[o]);
    return found;
  };
  const std::vector<Sum<T>> inner = product(x, a.down, a.down_bias, n), u = product(inner, a.gates, a.gates_bias, 3 * n);
  Sum<T>* cell = static_cast<Sum<T>*>(a.cell) + r * n;
  std::vector<Sum<T>> h(n);
  const Sum<T> scale = std::sqrt(Sum<T>(3));
  for (int64_t i = 0; i < n; ++i) {
    cell[i] = u[i] + sigmoid(u[n + i]) * (cell[i] - u[i]);
    h[i] = scale * inner[i] + sigmoid(u[2 * n + i]) * (cell[i] - scale * inner[i]);
  }
  const std::vector<Sum<T>> up = product(h, a.up, a.up_bias, C);
  for (int64_t i = 0; i < C; ++i) y[i] += up[i];
}

template <class T> void feed(const FeedForward& a) {
  const int64_t C = a.width, blocks = a.units / a.block, sizes[] = {1, C, a.rank, a.units, a.block, a.threads};
  const int64_t sum_sizes[] = {1, C, blocks, 1};
  std::vector<int64_t> chosen(blocks);
  std::vector<T> hidden(blocks), row(C);
  for (int64_t r = 0; r < a.rows; ++r) {
    const T* x = static_cast<const T*>(a.x) + r * C;
    choose<T>(normed(x, C, a.norm), static_cast<const T*>(a.inner), static_cast<const T*>(a.outer),
              static_cast<const T*>(a.controller_bias), static_cast<const T*>(a.in), chosen.data(), hidden.data(), sizes);
    for (T& unit : hidden)
      if (wide(unit) < 0) narrow(Sum<T>(0), &unit);
    sum<T>(hidden.data(), chosen.data(), static_cast<const T*>(a.out), static_cast<const T*>(a.bias), row.data(), sum_sizes);
    std::vector<Sum<T>> y = widened(row.data(), C);
    if (a.recurrent) recur<T>(a, r, y);
    for (int64_t i = 0; i < C; ++i) narrow(y[i], static_cast<T*>(a.y) + r * C + i);
  }
}

}  // namespace

#define EXPORT(T, name)                                                                                                              \
  extern "C" void choose_##name(const T* x, const T* A, const T* B, const T* bias, const T* W, int64_t* chosen, T* hidden,           \
                                const int64_t* sizes) {                                                                              \
    choose<T>(widened(x, sizes[0] * sizes[1]), A, B, bias, W, chosen, hidden, sizes);                                                                          \
  }                                                                                                                                  \
  extern "C" void sum_##name(const T* hidden, const int64_t* chosen, const T* W, const T* bias, T* y, const int64_t* sizes) {        \
    sum<T>(hidden, chosen, W, bias, y, sizes);                                                                                       \
  }                                                                                                                                  \
  extern "C" void few_##name(const T* x, const T* gains, const T* W, const T* bias, T* y, const int64_t* sizes) {                    \
    few<T>(x, gains, W, bias, y, sizes);                                                                                             \
  }                                                                                                                                  \
  extern "C" void project_##name(const Projections* a) {                                                                             \
    for (int64_t r = 0; r < a->rows; ++r) project_row<T>(*a, r);                                                                     \
  }                                                                                                                                  \
  extern "C" void feed_##name(const FeedForward* a) { feed<T>(*a); }
EXPORT(float, float)
EXPORT(double, double)
EXPORT(Half, bfloat16)
