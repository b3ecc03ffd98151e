// The scans of this folder on a CPU, one token after another. compiled.py compiles and calls them; aggregates.py and sru.py say what
// they compute. Strides count numbers, and may be negative: time is then reversed.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

template <class F> void share(int64_t count, int64_t threads, F work) {
  threads = threads < count ? threads : count;
  std::vector<std::thread> others;
  for (int64_t i = 1; i < threads; ++i) others.emplace_back(work, count * i / threads, count * (i + 1) / threads);
  work(0, threads > 1 ? count / threads : count);
  for (auto& other : others) other.join();
}

template <class T> struct Rows {  // (B,H,T,V), V with stride 1
  T* data;
  int64_t batch, head, time;
  T* at(int64_t b, int64_t h, int64_t t) const { return data + b * batch + h * head + t * time; }
};

// An aggregate: the sums of weights exp(score - top), and of weighted values.
struct Sum {
  double top, weights, *values;
  void clear(int64_t width) {
    top = -INFINITY, weights = 0;
    for (int64_t i = 0; i < width; ++i) values[i] = 0;
  }
  template <class T> void add(T score, const T* value, int64_t width) {
    if (score > top) {
      const double old = std::exp(top - score);
      top = score, weights *= old;
      for (int64_t i = 0; i < width; ++i) values[i] *= old;
    }
    const double weight = std::exp(score - top);
    weights += weight;
    for (int64_t i = 0; i < width; ++i) values[i] += weight * value[i];
  }
};

// A window ends in one block of its length and begins in the block before: one sum grows with the tokens, the others are kept from
// the end of the block before.
template <class T>
void pool_row(Rows<const T> a, Rows<const T> x, const int64_t* texts, int64_t text_stride, Rows<T> logs, Rows<T> means, int64_t b,
              int64_t h, int64_t total, int64_t width, int64_t window) {
  const int64_t size = window && window < total ? window : total, kept = size < total ? size : 0;
  std::vector<double> numbers((kept + 1) * width), tops(kept), weights(kept);
  Sum now{0, 0, numbers.data() + kept * width};
  auto text = [&](int64_t t) { return texts ? texts[t * text_stride] : 0; };
  for (int64_t start = 0; start < total; start += size) {
    const int64_t stop = start + size < total ? start + size : total;
    if (start) {
      now.clear(width);
      for (int64_t t = start - 1; t > start - size; --t) {
        if (text(t) == text(start - 1)) now.add(*a.at(b, h, t), x.at(b, h, t), width);
        const int64_t i = t - (start - size);
        tops[i] = now.top, weights[i] = now.weights;
        std::memcpy(numbers.data() + i * width, now.values, width * sizeof(double));
      }
    }
    now.clear(width);
    for (int64_t t = start; t < stop; ++t) {
      if (t > start && text(t) != text(t - 1)) now.clear(width);
      now.add(*a.at(b, h, t), x.at(b, h, t), width);
      T* out = means.at(b, h, t);
      const int64_t i = t - start + 1;
      if (start && i < size && text(t) == text(start - 1)) {
        const double top = now.top > tops[i] ? now.top : tops[i];
        const double mine = std::exp(now.top - top), past = std::exp(tops[i] - top), sum = mine * now.weights + past * weights[i];
        const double *values = numbers.data() + i * width, share = mine / sum, rest = past / sum;
        for (int64_t j = 0; j < width; ++j) out[j] = T(share * now.values[j] + rest * values[j]);
        *logs.at(b, h, t) = T(top + std::log(sum));
      } else {
        const double share = 1 / now.weights;
        for (int64_t j = 0; j < width; ++j) out[j] = T(share * now.values[j]);
        *logs.at(b, h, t) = T(now.top + std::log(now.weights));
      }
    }
  }
}

template <class T>
void pool(const T* a, const int64_t* a_strides, const T* x, const int64_t* x_strides, const int64_t* texts,
          const int64_t* text_strides, T* logs, const int64_t* log_strides, T* means, const int64_t* mean_strides,
          const int64_t* sizes) {
  auto rows = [](auto* data, const int64_t* s) { return Rows<std::remove_pointer_t<decltype(data)>>{data, s[0], s[1], s[2]}; };
  const int64_t heads = sizes[1];
  share(sizes[0] * heads, sizes[5], [=](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      pool_row<T>(rows(a, a_strides), rows(x, x_strides), texts ? texts + row / heads * text_strides[0] : nullptr, text_strides[1],
                  rows(logs, log_strides), rows(means, mean_strides), row / heads, row % heads, sizes[2], sizes[3], sizes[4]);
  });
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

// product (T,B,3D), x, h, f, r (T,B,D), c (T+1,B,D) with c[0] given; padded and keep (T,B), or null. f and r are null where no
// gradient needs them, and c has then 1 instead of T+1 rows.
template <class T>
void sru(const T* product, const T* x, const T* v_forget, const T* v_reset, const uint8_t* padded, const T* keep, T* c, T* h, T* f,
         T* r, T scale, const int64_t* sizes) {
  const int64_t total = sizes[0], batch = sizes[1], width = sizes[2];
  share(batch, sizes[3], [=](int64_t first, int64_t last) {
    for (int64_t t = 0; t < total; ++t)
      for (int64_t b = first; b < last; ++b) {
        const int64_t row = t * batch + b, at = row * width;
        const T *u = product + 3 * at, *F = u + width, *R = F + width, *in = x + at;
        const T *before = f ? c + at : c + b * width, left = keep ? keep[row] : T(1);
        T *after = f ? c + at + batch * width : c + b * width, *out = h + at;
        if (padded && padded[row]) {
          for (int64_t j = 0; j < width; ++j) after[j] = left * before[j], out[j] = 0;
          if (f)
            for (int64_t j = 0; j < width; ++j) f[at + j] = 1, r[at + j] = 0;
          continue;
        }
#pragma GCC ivdep
        for (int64_t j = 0; j < width; ++j) {
          const T past = left * before[j];
          const T forget = sigmoid(F[j] + v_forget[j] * past), reset = sigmoid(R[j] + v_reset[j] * past);
          const T now = u[j] + forget * (past - u[j]), passed = scale * in[j];
          after[j] = now, out[j] = passed + reset * (now - passed);
          if (f) f[at + j] = forget, r[at + j] = reset;
        }
      }
  });
}

}  // namespace

#define EXPORT(T, name)                                                                                                              \
  extern "C" void pool_##name(const T* a, const int64_t* as, const T* x, const int64_t* xs, const int64_t* texts, const int64_t* ts, \
                              T* logs, const int64_t* ls, T* means, const int64_t* ms, const int64_t* sizes) {                       \
    pool<T>(a, as, x, xs, texts, ts, logs, ls, means, ms, sizes);                                                                    \
  }                                                                                                                                  \
  extern "C" void sru_##name(const T* product, const T* x, const T* vf, const T* vr, const uint8_t* padded, const T* keep, T* c,     \
                             T* h, T* f, T* r, T scale, const int64_t* sizes) {                                                      \
    sru<T>(product, x, vf, vr, padded, keep, c, h, f, r, scale, sizes);                                                              \
  }
EXPORT(float, float)
EXPORT(double, double)
