// The scans of ops/vectors on a CPU, one token after another. compiled.py there calls them; aggregates.py and sru.py say what they
// compute. Strides count numbers, and may be negative: time is then reversed.
#include "common.h"

namespace {

template <class T> struct Rows {  // (B,H,T) or (B,H,T,V), where V has stride 1
  T* data;
  const int64_t* strides;
  T* at(int64_t b, int64_t h, int64_t t) const { return data + b * strides[0] + h * strides[1] + t * strides[2]; }
};

// An aggregate: the sums of weights exp(score - top), and of weighted values.
struct Sum {
  double top, weights, *values;
  void clear(int64_t width) {
    top = -INFINITY, weights = 0;
    for (int64_t i = 0; i < width; ++i) values[i] = 0;
  }
  double weigh(double score, int64_t width) {  // the weight of one more token
    if (score > top) {
      const double old = std::exp(top - score);
      top = score, weights *= old;
      for (int64_t i = 0; i < width; ++i) values[i] *= old;
    }
    const double weight = std::exp(score - top);
    weights += weight;
    return weight;
  }
  template <class T> void add(double weight, const T* value, int64_t width) {
    for (int64_t i = 0; i < width; ++i) values[i] += weight * value[i];
  }
};

// What is summed up over the tokens of a window, and what becomes of it: the means, or their gradients.
template <class T> struct Means {
  Rows<const T> scores, x;
  Rows<T> logs, means;
  int64_t b, h, width;
  int64_t channels() const { return width; }
  void add(Sum& sum, int64_t t) { sum.add(sum.weigh(*scores.at(b, h, t), width), x.at(b, h, t), width); }
  void write(int64_t t, const Sum& now, const Sum& before) {  // nothing is before where its top is -INFINITY
    const double top = now.top > before.top ? now.top : before.top, mine = std::exp(now.top - top), past = std::exp(before.top - top);
    const double total = mine * now.weights + past * before.weights, share = mine / total, rest = past / total;
    T* out = means.at(b, h, t);
    if (before.values)
      for (int64_t i = 0; i < width; ++i) out[i] = T(share * now.values[i] + rest * before.values[i]);
    else
      for (int64_t i = 0; i < width; ++i) out[i] = T(share * now.values[i]);
    *logs.at(b, h, t) = T(top + std::log(total));
  }
};

template <class T> struct Gradients {
  Rows<const T> logs, dmeans, means, dlogs, scores, x;
  Rows<T> dscores, dx;
  int64_t b, h, width;
  int64_t channels() const { return width + 1; }
  void add(Sum& sum, int64_t t) {
    const T *d = dmeans.at(b, h, t), log = *logs.at(b, h, t);
    const double weight = sum.weigh(log > T(NOTHING / 2) ? -log : T(NOTHING), width + 1);
    sum.add(weight, d, width);
    sum.values[width] += weight * (dot(d, means.at(b, h, t), width) - *dlogs.at(b, h, t));
  }
  void write(int64_t t, const Sum& now, const Sum& before) {
    const double score = *scores.at(b, h, t), mine = std::exp(score + now.top), past = std::exp(score + before.top);
    T *out = dx.at(b, h, t), shared = T(mine * now.values[width]);
    if (before.values) {
      for (int64_t i = 0; i < width; ++i) out[i] = T(mine * now.values[i] + past * before.values[i]);
      shared = T(mine * now.values[width] + past * before.values[width]);
    } else
      for (int64_t i = 0; i < width; ++i) out[i] = T(mine * now.values[i]);
    *dscores.at(b, h, t) = dot(x.at(b, h, t), out, width) - shared;
  }
};

// A window ends in one block of its length and begins in the block before: one sum grows with the tokens, the others are kept from
// the end of the block before. sizes: B, H, T, V, window, threads.
template <class Task> void over_windows(Task task, const int64_t* texts, int64_t text_stride, const int64_t* sizes) {
  const int64_t total = sizes[2], window = sizes[4], width = task.channels();
  const int64_t size = window && window < total ? window : total, kept = size < total ? size : 0;
  std::vector<double> numbers((kept + 1) * width), tops(kept), weights(kept);
  Sum now{0, 0, numbers.data() + kept * width};
  auto text = [&](int64_t t) { return texts ? texts[t * text_stride] : 0; };
  for (int64_t start = 0; start < total; start += size) {
    const int64_t stop = start + size < total ? start + size : total;
    if (start) {
      now.clear(width);
      for (int64_t t = start - 1, i = size - 1; i > 0; --t, --i) {
        if (text(t) == text(start - 1)) task.add(now, t);
        tops[i] = now.top, weights[i] = now.weights;
        std::memcpy(numbers.data() + i * width, now.values, width * sizeof(double));
      }
    }
    now.clear(width);
    for (int64_t t = start, i = 1; t < stop; ++t, ++i) {
      if (t > start && text(t) != text(t - 1)) now.clear(width);
      task.add(now, t);
      const bool more = start && i < size && text(t) == text(start - 1);
      task.write(t, now, more ? Sum{tops[i], weights[i], numbers.data() + i * width} : Sum{-INFINITY, 0, nullptr});
    }
  }
}

template <class Start> void every_row(Start start, const int64_t* texts, const int64_t* text_strides, const int64_t* sizes) {
  share(sizes[0] * sizes[1], sizes[5], [=](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t b = row / sizes[1], h = row % sizes[1];
      over_windows(start(b, h), texts ? texts + b * text_strides[0] : nullptr, text_strides[1], sizes);
    }
  });
}

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

using Strides = const int64_t*;

#define EXPORT(T, name)                                                                                                              \
  extern "C" void pool_##name(const T* a, Strides as, const T* x, Strides xs, T* logs, Strides ls, T* means, Strides ms,             \
                              const int64_t* texts, Strides ts, const int64_t* sizes) {                                              \
    auto start = [=](int64_t b, int64_t h) { return Means<T>{{a, as}, {x, xs}, {logs, ls}, {means, ms}, b, h, sizes[3]}; };          \
    every_row(start, texts, ts, sizes);                                                                                              \
  }                                                                                                                                  \
  extern "C" void pool_gradients_##name(const T* logs, Strides ls, const T* dmeans, Strides dms, const T* means, Strides ms,         \
                                        const T* dlogs, Strides dls, const T* a, Strides as, const T* x, Strides xs, T* da,          \
                                        Strides das, T* dx, Strides dxs, const int64_t* texts, Strides ts, const int64_t* sizes) {   \
    auto start = [=](int64_t b, int64_t h) {                                                                                         \
      return Gradients<T>{{logs, ls}, {dmeans, dms}, {means, ms}, {dlogs, dls}, {a, as}, {x, xs}, {da, das}, {dx, dxs}, b, h,        \
                          sizes[3]};                                                                                                 \
    };                                                                                                                               \
    every_row(start, texts, ts, sizes);                                                                                              \
  }                                                                                                                                  \
  extern "C" void sru_##name(const T* product, const T* x, const T* vf, const T* vr, const uint8_t* padded, const T* keep, T* c,     \
                             T* h, T* f, T* r, T scale, const int64_t* sizes) {                                                      \
    sru<T>(product, x, vf, vr, padded, keep, c, h, f, r, scale, sizes);                                                              \
  }
EXPORT(float, float)
EXPORT(double, double)
