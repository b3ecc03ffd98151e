// One token of generation on a CPU, for all hypotheses: what generation/ calls between two matrix products. The states change in place.
// memory_loop.py and pools.py there have the structs of the arguments under the same names, and say what is computed.
#include "common.h"

namespace {

enum Map { IDENTITY = 1, ELU, RELU, DPFP };  // the numbers of feature_maps.py
enum Norm { NONE, SUM, L2, L2_EPS };
enum Normaliser { WITHOUT, WRITE, KEYS, KEYS_READ };  // KEYS divides what is erased, too

struct Features {  // (keys) made of rows (input)
  int64_t input, keys, map, nu, norm;
};

template <class T> struct View {  // (R,H) or (R,H,X), where X has stride 1; strides count numbers
  T* data;
  int64_t row, head;
  T* at(int64_t r, int64_t h) const { return data + r * row + h * head; }
};

// The fast-weight memory (R,H,K,V), or (R,H,K,V+1) with sums of keys: row r continues from row order[r] of ``source``, which may be
// ``memory`` itself without an order. The coefficients f (R,H) or (R,H,K), z (R,H,V), e (R,H) or (R,H,K) and w (R,H) may be null.
// So may the rest, each (R,H,K). With u, the bonus, outputs read the memory as it was before the token. With p, what p reads is taken
// away where a says, before the write; there is no e then, and no normaliser. Neither u nor p goes with factors.
//
// While there are few tokens, the memory may be their factors in place of a matrix: keys (rows,H,room,K) and values (rows,H,room,V or
// V+1). Token t of hypothesis r is in row places[r * room + t].
template <class T> struct MemoryStep : Features {
  View<const T> q, k, v, f, z, e, w, u, a, p;
  T *memory, *y;
  const T* source;
  const int64_t* order;
  T *factor_keys, *factor_values;
  int64_t* places;
  int64_t tokens, room, rows, heads, values, decay_of_keys, erase_of_keys, normaliser, threads;
  double eps, scale;
  bool erases() const { return e.data || p.data; }
};

template <class T> void apply(const Features& s, const T* x, T* unrolled, T* y) {
  const int64_t n = s.input;
  if (s.map == DPFP) {  // y = [x' rolled by 1 .. nu] * x', x' = [relu(x), relu(-x)] written twice
    for (int64_t i = 0; i < n; ++i) {
      unrolled[i] = unrolled[i + 2 * n] = x[i] < 0 ? 0 : x[i];
      unrolled[i + n] = unrolled[i + 3 * n] = x[i] > 0 ? 0 : -x[i];
    }
    for (int64_t j = 1; j <= s.nu; ++j)
      for (int64_t i = 0; i < 2 * n; ++i) y[(j - 1) * 2 * n + i] = unrolled[i] * unrolled[i + 2 * n - j];
  } else if (s.map == ELU) {
    for (int64_t i = 0; i < n; ++i) {
      const T e = exponential(x[i] > 0 ? 0 : x[i]);
      y[i] = x[i] > 0 ? x[i] + 1 : e;
    }
  } else {
    for (int64_t i = 0; i < n; ++i) y[i] = s.map == RELU && x[i] < 0 ? 0 : x[i];
  }
  if (s.norm == NONE) return;
  T total = 0;
  for (int64_t i = 0; i < s.keys; ++i) total += s.norm == SUM ? y[i] : y[i] * y[i];
  const T least = s.norm == SUM ? T(1e-6) : T(1e-12);
  const T size = s.norm == SUM ? total : std::sqrt(total + (s.norm == L2_EPS ? T(1e-6) : T(0)));
  const T share = 1 / (size < least ? least : size);
  for (int64_t i = 0; i < s.keys; ++i) y[i] *= share;
}

// The token of one head of one row, and what is being made of it.
template <class T> struct Token {
  std::vector<T> numbers;
  T *unrolled, *q, *k, *reading, *left, *recalled, *written, *read;
  const T *f, *erasing;  // erasing: the key that an erase reads with
  T strength, erase;
  int64_t columns;
  explicit Token(const MemoryStep<T>& s) : numbers(4 * s.input + 3 * s.keys + 4 * s.values) {
    unrolled = numbers.data(), q = unrolled + 4 * s.input, k = q + s.keys, reading = k + s.keys;
    left = reading + s.keys, recalled = left + s.values, written = recalled + s.values, read = written + s.values;
    columns = s.values + (s.normaliser != WITHOUT);
  }
  void load(const MemoryStep<T>& s, int64_t row, int64_t head) {
    apply(s, s.q.at(row, head), unrolled, q);
    apply(s, s.k.at(row, head), unrolled, k);
    const T *v = s.v.at(row, head), *z = s.z.data ? s.z.at(row, head) : nullptr;
    f = s.f.data ? s.f.at(row, head) : nullptr;
    strength = s.w.data ? *s.w.at(row, head) : T(1), erase = s.e.data ? *s.e.at(row, head) : T(0);
    erasing = s.p.data ? s.p.at(row, head) : s.erase_of_keys ? reading : k;
    if (s.erase_of_keys) {
      const T* e = s.e.at(row, head);
      for (int64_t j = 0; j < s.keys; ++j) reading[j] = e[j] * k[j];
      erase = 1;
    }
    T own = 0;
    if (s.u.data)
      for (int64_t j = 0; j < s.keys; ++j) own += s.u.at(row, head)[j] * k[j] * q[j];
    for (int64_t c = 0; c < s.values; ++c) {
      left[c] = z ? z[c] : T(1), written[c] = strength * v[c], read[c] = own * written[c], recalled[c] = 0;
    }
  }
  T kept(const MemoryStep<T>& s, int64_t j) const { return f ? f[s.decay_of_keys ? j : 0] : T(1); }
  void take_away(const MemoryStep<T>& s, T sum) {  // sum: of the keys before, times this key
    const T share = s.normaliser == KEYS ? erase / (sum + T(s.eps)) : erase;
    for (int64_t c = 0; c < s.values; ++c) written[c] -= share * left[c] * recalled[c];
  }
  void give(const MemoryStep<T>& s, int64_t row, int64_t head, T sum) {
    const T scale = T(s.scale) / (s.normaliser == WITHOUT ? T(1) : sum + T(s.eps));
    T* y = s.y + (row * s.heads + head) * s.values;
    for (int64_t c = 0; c < s.values; ++c) y[c] = scale * read[c];
  }
};

// The memory of one key, V numbers, before the token and after it; the query reads one of them.
template <class T> struct Line {
  const T* from;
  T* to;
  T key, query, stays, removed;
};

template <bool REMOVES, bool BEFORE, class T> void write_and_read(const Line<T>& line, const Token<T>& a, int64_t V) {
  const T* from = line.from;
  T *to = line.to, *const __restrict read = a.read;
  const T *const __restrict written = a.written, *const __restrict recalled = a.recalled, *const __restrict left = a.left;
  const T key = line.key, query = line.query, stays = line.stays, removed = line.removed;
#pragma GCC ivdep
  for (int64_t c = 0; c < V; ++c) {
    const T was = from[c], now = stays * left[c] * was + key * written[c] - (REMOVES ? removed * left[c] * recalled[c] : T(0));
    to[c] = now, read[c] += query * (BEFORE ? was : now);
  }
}

// A first pass over the memory recalls what the key erases; a second one writes and reads.
template <class T> void one_head(const MemoryStep<T>& s, int64_t row, int64_t head, Token<T>& a) {
  const int64_t K = s.keys, V = s.values, columns = a.columns, block = K * columns;
  const T* source = s.source + ((s.order ? s.order[row] : row) * s.heads + head) * block;
  T *memory = s.memory + (row * s.heads + head) * block, sum = 0;
  T* const __restrict recalled = a.recalled;
  a.load(s, row, head);
  if (s.erases()) {
    for (int64_t j = 0; j < K; ++j) {
      const T *const __restrict line = source + j * columns, key = a.erasing[j] * a.kept(s, j);
      for (int64_t c = 0; c < V; ++c) recalled[c] += key * line[c];
      if (s.normaliser == KEYS) sum += a.k[j] * line[V];
    }
    if (s.e.data) a.take_away(s, sum);
  }
  sum = 0;
  const T* removes = s.p.data ? s.a.at(row, head) : nullptr;
  for (int64_t j = 0; j < K; ++j) {
    const T* from = source + j * columns;
    T* to = memory + j * columns;
    const Line<T> line{from, to, a.k[j], a.q[j], a.kept(s, j), removes ? removes[j] : T(0)};
    if (removes)
      write_and_read<true, false>(line, a, V);
    else if (s.u.data)
      write_and_read<false, true>(line, a, V);
    else
      write_and_read<false, false>(line, a, V);
    if (s.normaliser != WITHOUT) {
      to[V] = s.normaliser == WRITE ? line.stays * from[V] + line.key * a.strength : from[V] + line.key;
      sum += line.query * to[V];
    }
  }
  a.give(s, row, head, sum);
}

// The same with factors. A decay changes those of the tokens before, which are then this hypothesis's own.
template <class T> void one_head_of_factors(const MemoryStep<T>& s, int64_t row, int64_t head, Token<T>& a) {
  const int64_t K = s.keys, V = s.values, columns = a.columns, *places = s.places + row * s.room;
  const auto at = [&](int64_t t) { return (places[t] * s.heads + head) * s.room + t; };
  a.load(s, row, head);
  T *const __restrict read = a.read, *const __restrict recalled = a.recalled, sum = 0, erased = 0;
  for (int64_t t = 0; t < s.tokens; ++t) {
    T *keys = s.factor_keys + at(t) * K, *const __restrict values = s.factor_values + at(t) * columns;
    if (s.decay_of_keys)
      for (int64_t j = 0; j < K; ++j) keys[j] *= a.f[j];
    else if (a.f)
      for (int64_t c = 0; c < V + (s.normaliser == WRITE); ++c) values[c] *= *a.f;
    if (s.z.data)
      for (int64_t c = 0; c < V; ++c) values[c] *= a.left[c];
    const T seen = dot(a.q, keys, K);
    for (int64_t c = 0; c < V; ++c) read[c] += seen * values[c];
    if (s.normaliser != WITHOUT) sum += seen * values[V];
    if (!s.e.data) continue;
    const T known = dot(a.erasing, keys, K);
    for (int64_t c = 0; c < V; ++c) recalled[c] += known * values[c];
    if (s.normaliser == KEYS) erased += known * values[V];
  }
  if (s.e.data) {
    for (int64_t c = 0; c < V; ++c) a.left[c] = 1;  // the values have decayed
    a.take_away(s, erased);
  }
  const T own = dot(a.q, a.k, K);
  const int64_t here = (row * s.heads + head) * s.room + s.tokens;
  T* values = s.factor_values + here * columns;
  std::memcpy(s.factor_keys + here * K, a.k, K * sizeof(T));
  for (int64_t c = 0; c < V; ++c) values[c] = a.written[c], read[c] += own * a.written[c];
  if (s.normaliser != WITHOUT) values[V] = s.normaliser == WRITE ? a.strength : T(1), sum += own * values[V];
  a.give(s, row, head, sum);
}

template <class T> void memory_step(const MemoryStep<T>& s) {
  share(s.rows * s.heads, s.threads, [&](int64_t first, int64_t last) {
    Token<T> token(s);
    for (int64_t i = first; i < last; ++i)
      if (s.factor_keys)
        one_head_of_factors(s, i / s.heads, i % s.heads, token);
      else
        one_head(s, i / s.heads, i % s.heads, token);
  });
  if (s.factor_keys)
    for (int64_t row = 0; row < s.rows; ++row) s.places[row * s.room + s.tokens] = row;
}

// What row r reads of the memory (B,H,K,V) of its source, r / beam, divided by what it reads of the sums of keys (B,H,K), if any.
template <class T> struct SourceStep : Features {
  View<const T> q;
  const T *memory, *sums;
  T* y;
  int64_t beam, rows, heads, values, threads;
  double eps;
};

template <class T> void source_step(const SourceStep<T>& s) {
  share(s.rows / s.beam * s.heads, s.threads, [&](int64_t first, int64_t last) {
    std::vector<T> room(4 * s.input + s.keys + s.values);
    T *unrolled = room.data(), *q = unrolled + 4 * s.input, *const __restrict read = q + s.keys;
    for (int64_t i = first; i < last; ++i)
      for (int64_t row = i / s.heads * s.beam, head = i % s.heads, end = row + s.beam; row < end; ++row) {
        apply(s, s.q.at(row, head), unrolled, q);
        std::memset(read, 0, s.values * sizeof(T));
        for (int64_t j = 0; j < s.keys; ++j) {
          const T *const __restrict line = s.memory + (i * s.keys + j) * s.values, query = q[j];
          for (int64_t c = 0; c < s.values; ++c) read[c] += query * line[c];
        }
        const T share = s.sums ? 1 / (dot(q, s.sums + i * s.keys, s.keys) + T(s.eps)) : T(1);
        T* y = s.y + (row * s.heads + head) * s.values;
        for (int64_t c = 0; c < s.values; ++c) y[c] = share * read[c];
      }
  });
}

// Softmax-weighted means of the past, one for each row and head: ``running`` of all tokens, or, with a window, of those in ``back``.
// ``front`` has the aggregates from each of its tokens to its last one. An aggregate is a mean and then the log of its weights.
template <class T> struct Pool {
  T *front, *back, *running;
  int64_t windowed, size, start, filled;
};

template <class T> void merge(T* x, const T* y, int64_t width) {  // x becomes the aggregate of both
  const T top = x[width] > y[width] ? x[width] : y[width], mine = std::exp(x[width] - top), other = std::exp(y[width] - top);
  const T total = mine + other, share = mine / total, rest = other / total;
  for (int64_t i = 0; i < width; ++i) x[i] = share * x[i] + rest * y[i];
  x[width] = top + std::log(total);
}

// Adds a token, (width + 1), and puts the mean of what it sees into ``mean``, which has room for as many numbers.
template <class T> void look_back(const Pool<T>& p, int64_t at, int64_t width, const T* token, T* mean) {
  const int64_t line = width + 1;
  T* running = p.running + at * line;
  merge(running, token, width);
  std::memcpy(mean, running, line * sizeof(T));
  if (!p.windowed || !p.size) return;
  merge(mean, p.front + (at * p.size + p.start) * line, width);
  std::memcpy(p.back + (at * p.size + p.filled) * line, token, line * sizeof(T));
}

// After the token of all rows: the window loses its oldest one. When the front is empty, the back becomes the next one.
template <class T> void advance(Pool<T>& p, int64_t rows, int64_t width) {
  if (!p.windowed) return;
  if (p.size) ++p.start, ++p.filled;
  if (p.start < p.size) return;
  const int64_t line = width + 1;
  std::swap(p.front, p.back);
  for (int64_t at = 0; at < rows; ++at) {
    for (int64_t i = p.size - 2; i >= 0; --i) {
      T* token = p.front + (at * p.size + i) * line;
      merge(token, token + line, width);
    }
    p.running[at * line + width] = T(NOTHING);
  }
  p.start = p.filled = 0;
}

// The arguments of additive attention, and of LEAP, which reads no x, no parameters and one pool. projected: (R,3C) or (R,4C).
template <class T> struct PooledStep {
  const T *projected, *x, *query_score, *key_score, *weight, *bias;
  T* y;
  Pool<T>*first, *second;
  int64_t rows, heads, width;
  double eps, scale;
};

// y = p' v with p' = pool(p), p = LayerNorm(x + pool(q) k). projected: q, k, v.
template <class T> void additive(const PooledStep<T>& s) {
  const int64_t V = s.width, C = s.heads * V;
  std::vector<T> room(C + 2 * (V + 1));
  T *p = room.data(), *token = p + C, *mean = token + V + 1;
  const auto pooled = [&](const Pool<T>& pool, const T* x, const T* score, int64_t row, int64_t head) {
    std::memcpy(token, x + head * V, V * sizeof(T));
    token[V] = dot(token, score + head * V, V) * T(s.scale);
    look_back(pool, row * s.heads + head, V, token, mean);
  };
  for (int64_t row = 0; row < s.rows; ++row) {
    const T *q = s.projected + row * 3 * C, *k = q + C, *v = k + C, *x = s.x + row * C;
    T* y = s.y + row * C;
    for (int64_t h = 0; h < s.heads; ++h) {
      pooled(*s.first, q, s.query_score, row, h);
      for (int64_t i = 0; i < V; ++i) p[h * V + i] = x[h * V + i] + mean[i] * k[h * V + i];
    }
    T middle = 0, spread = 0;
    for (int64_t i = 0; i < C; ++i) middle += p[i];
    middle /= C;
    for (int64_t i = 0; i < C; ++i) p[i] -= middle, spread += p[i] * p[i];
    const T share = 1 / std::sqrt(spread / C + T(s.eps));
    for (int64_t i = 0; i < C; ++i) p[i] = p[i] * share * s.weight[i] + s.bias[i];
    for (int64_t h = 0; h < s.heads; ++h) {
      pooled(*s.second, p, s.key_score, row, h);
      for (int64_t i = 0; i < V; ++i) y[h * V + i] = mean[i] * v[h * V + i];
    }
  }
  advance(*s.first, s.rows * s.heads, V);
  advance(*s.second, s.rows * s.heads, V);
}

// y = sigmoid(q k' / sqrt(d)) v', where k' and v' are means weighted by elu(f k / sqrt(d)) + 1. projected: q, f, k, v.
template <class T> void leap(const PooledStep<T>& s) {
  const int64_t V = s.width, C = s.heads * V;
  std::vector<T> room(2 * (2 * V + 1));
  T *token = room.data(), *mean = token + 2 * V + 1;
  for (int64_t row = 0; row < s.rows; ++row)
    for (int64_t h = 0; h < s.heads; ++h) {
      const T *q = s.projected + row * 4 * C + h * V, *f = q + C, *k = f + C, *v = k + C;
      std::memcpy(token, k, V * sizeof(T)), std::memcpy(token + V, v, V * sizeof(T));
      const T focus = dot(f, k, V) * T(s.scale);
      token[2 * V] = focus > 0 ? std::log1p(focus) : focus;
      look_back(*s.first, row * s.heads + h, 2 * V, token, mean);
      const T open = sigmoid(dot(q, mean, V) * T(s.scale));
      T* y = s.y + row * C + h * V;
      for (int64_t i = 0; i < V; ++i) y[i] = open * mean[V + i];
    }
  advance(*s.first, s.rows * s.heads, 2 * V);
}

}  // namespace

#define EXPORT(T, name)                                                            \
  extern "C" void memory_step_##name(const MemoryStep<T>* s) { memory_step(*s); }  \
  extern "C" void source_step_##name(const SourceStep<T>* s) { source_step(*s); }  \
  extern "C" void additive_step_##name(const PooledStep<T>* s) { additive(*s); }   \
  extern "C" void leap_step_##name(const PooledStep<T>* s) { leap(*s); }
EXPORT(float, float)
EXPORT(double, double)
