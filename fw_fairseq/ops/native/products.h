// Products of a few vectors with rows that come from memory. Eight rows are read at the same time: one core reads several pages side
// by side faster than one after another.
#pragma once
#include <type_traits>
#include <utility>

#include "team.h"

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

#if defined(__AVX512F__)
constexpr int REGISTER = 64, TILE = 4;  // bytes of a register; vectors that share what is read of the rows
#elif defined(__AVX__)
constexpr int REGISTER = 32, TILE = 2;
#else
constexpr int REGISTER = 16, TILE = 2;
#endif
constexpr int64_t ROWS = 8;  // that are read at the same time for one vector

template <class S> struct Pack {
  static constexpr int64_t size = REGISTER / sizeof(S);
  typedef S type __attribute__((vector_size(REGISTER)));
};

template <class T> inline typename Pack<T>::type load(const T* p) {
  typename Pack<T>::type v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Pack<float>::type load(const Half* p) {
  typedef uint16_t Halves __attribute__((vector_size(REGISTER / 2)));
  typedef uint32_t Words __attribute__((vector_size(REGISTER)));
  Halves halves;
  std::memcpy(&halves, p, sizeof halves);
  const Words words = __builtin_convertvector(halves, Words) << 16;
  Pack<float>::type v;
  std::memcpy(&v, &words, sizeof v);
  return v;
}

template <class S> inline void store(S* p, typename Pack<S>::type v) { std::memcpy(p, &v, sizeof v); }

// Lanes 0, 2, 4 .. of a and b, side by side, or lanes 1, 3, 5 ..
template <int64_t FIRST, class S, size_t... I>
inline typename Pack<S>::type half_of(typename Pack<S>::type a, typename Pack<S>::type b, std::index_sequence<I...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, (2 * I + FIRST)...);
#else
  using Index = std::conditional_t<sizeof(S) == 4, int32_t, int64_t>;
  typedef Index Places __attribute__((vector_size(REGISTER)));
  return __builtin_shuffle(a, b, Places{Index(2 * I + FIRST)...});
#endif
}

// The sums of the lanes of each of N registers, as a tree of pairs.
template <int N, class S> inline void sums_of_lanes(typename Pack<S>::type* packs, S* sums) {
  constexpr auto lanes = std::make_index_sequence<Pack<S>::size>();
  int count = N;
  for (int64_t left = Pack<S>::size; left > 1; left /= 2) {
    const int pairs = count > 1 ? count / 2 : 1;
    for (int i = 0; i < pairs; ++i) {
      const auto a = packs[count > 1 ? 2 * i : 0], b = packs[count > 1 ? 2 * i + 1 : 0];
      packs[i] = half_of<0, S>(a, b, lanes) + half_of<1, S>(a, b, lanes);
    }
    count = pairs;
  }
  std::memcpy(sums, packs, N * sizeof(S));
}

// sums[r * M + m] = the product of row r with vector m, for R rows and M vectors. Meanwhile rows of ``next`` are brought near: all of
// them where there is one vector, else those from first to last.
template <int R, int M, class T>
inline void tile(const T* const* rows, const Sum<T>* const* x, int64_t width, Sum<T>* sums, const T* const* next, int first, int last) {
  using V = typename Pack<Sum<T>>::type;
  constexpr int64_t N = Pack<Sum<T>>::size;
  V packs[R * M] = {};
  int64_t i = 0;
  for (; i + N <= width; i += N) {
    V in[M];
    for (int m = 0; m < M; ++m) in[m] = load(x[m] + i);
    if constexpr (M > 1)
      for (int r = first; r < last; ++r) __builtin_prefetch(next[r] + i);
    for (int r = 0; r < R; ++r) {
      if constexpr (M == 1) __builtin_prefetch(next[r] + i);
      const V row = load(rows[r] + i);
      for (int m = 0; m < M; ++m) packs[r * M + m] += in[m] * row;
    }
  }
  sums_of_lanes<R * M, Sum<T>>(packs, sums);
  for (; i < width; ++i)
    for (int r = 0; r < R; ++r)
      for (int m = 0; m < M; ++m) sums[r * M + m] += x[m][i] * wide(rows[r][i]);
}

// Calls give(o, r, product) with the product of row o, at(o), and vector r (width), for rows first .. last and every vector of x.
template <int R, int M, class T, class At, class Give>
void tiles(const Sum<T>* x, int64_t vectors, int64_t width, int64_t first, int64_t last, At at, Give give) {
  const T *rows[R], *next[R];
  const int64_t passes = (vectors + M - 1) / M;
  auto choose = [&](const T** of, int64_t o) {  // rows beyond the last one repeat it
    for (int64_t r = 0; r < R; ++r) of[r] = at(o + r < last ? o + r : last - 1);
  };
  if (first < last) choose(next, first);
  for (int64_t o = first; o < last; o += R) {
    std::memcpy(rows, next, sizeof rows);
    const bool more = o + R < last;
    if (more) choose(next, o + R);
    for (int64_t pass = 0; pass < passes; ++pass) {
      const Sum<T>* in[M];
      Sum<T> sums[R * M];
      for (int64_t m = 0; m < M; ++m) in[m] = x + (pass * M + m < vectors ? pass * M + m : vectors - 1) * width;
      tile<R, M>(rows, in, width, sums, next, more ? R * pass / passes : 0, more ? R * (pass + 1) / passes : 0);
      for (int64_t r = 0; r < R && o + r < last; ++r)
        for (int64_t m = 0; m < M && pass * M + m < vectors; ++m) give(o + r, pass * M + m, sums[r * M + m]);
    }
  }
}

template <class T, class At, class Give>
void products_at(const Sum<T>* x, int64_t vectors, int64_t width, int64_t first, int64_t last, At at, Give give) {
  if (vectors == 1)
    tiles<ROWS, 1, T>(x, 1, width, first, last, at, give);
  else
    tiles<4, TILE, T>(x, vectors, width, first, last, at, give);
}

// The same with the rows of a matrix.
template <class T, class Give>
void products(const Sum<T>* x, int64_t vectors, int64_t width, int64_t first, int64_t last, const T* W, Give give) {
  products_at<T>(x, vectors, width, first, last, [=](int64_t o) { return W + o * width; }, give);
}

// y += the sum of weights[r] rows[r] for R rows; the rows of ``next`` are brought near meanwhile.
template <int R, class T>
void add(Sum<T>* y, const Sum<T>* weights, const T* const* rows, int64_t width, const T* const* next) {
  constexpr int64_t N = Pack<Sum<T>>::size;
  int64_t i = 0;
  for (; i + N <= width; i += N) {
    typename Pack<Sum<T>>::type sums[2] = {load(y + i)};
    for (int r = 0; r < R; ++r) {
      __builtin_prefetch(next[r] + i);
      sums[r % 2] += weights[r] * load(rows[r] + i);
    }
    store(y + i, sums[0] + sums[1]);
  }
  for (; i < width; ++i)
    for (int r = 0; r < R; ++r) y[i] += weights[r] * wide(rows[r][i]);
}

// y += the sum of weights[r] rows[r]
template <class T> void add_rows(Sum<T>* y, const Sum<T>* weights, const T* const* rows, int64_t count, int64_t width) {
  int64_t r = 0;
  for (; r + ROWS <= count; r += ROWS) add<ROWS>(y, weights + r, rows + r, width, rows + (r + 2 * ROWS <= count ? r + ROWS : r));
  for (; r + 2 <= count; r += 2) add<2>(y, weights + r, rows + r, width, rows + (r + 4 <= count ? r + 2 : r));
  if (r < count) add<1>(y, weights + r, rows + r, width, rows + r);
}

template <class T> std::vector<Sum<T>> widened(const T* x, int64_t count) {
  std::vector<Sum<T>> y(count);
  for (int64_t i = 0; i < count; ++i) y[i] = wide(x[i]);
  return y;
}

}  // namespace
