// The part of the Metal Shading Language that kernels here use, in C++17 for g++, after Apple's specification.
// A kernel's text is included below it (emulator.py).
#pragma once

#include "runtime.h"
#include "short_numbers.hpp"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

// Address spaces mean nothing here; the lint (address_spaces.hpp) knows them. Variables that are declared `threadgroup`
// are replaced before (emulator.py); what is left are pointers and references.
#define device
#define constant
#define thread
#define threadgroup
#define METAL_FUNC inline
#define INFINITY __builtin_huge_valf()

typedef emulator::Small<false> half, float16_t;
typedef emulator::Small<true> bfloat, bfloat16_t;

namespace metal {

template <class T, int N> struct vec;
template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  vec() = default;
  explicit vec(T all) : x(all), y(all) {}
  vec(T x, T y) : x(x), y(y) {}
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  vec() = default;
  vec(T x, T y, T z) : x(x), y(y), z(z) {}
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  vec() = default;
  explicit vec(T all) : x(all), y(all), z(all), w(all) {}
  vec(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
};
#define NAMED(T) typedef vec<T, 2> T##2; typedef vec<T, 3> T##3; typedef vec<T, 4> T##4;
NAMED(float) NAMED(half) NAMED(bfloat) NAMED(int) NAMED(uint) NAMED(ushort)
#undef NAMED

template <class To, class From> To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
  return __builtin_bit_cast(To, value);
}

#define MATH \
  inline float exp(float x) { return __builtin_expf(x); } \
  inline float exp2(float x) { return __builtin_exp2f(x); } \
  inline float log(float x) { return __builtin_logf(x); } \
  inline float sqrt(float x) { return __builtin_sqrtf(x); } \
  inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
MATH
namespace fast { MATH }
namespace precise { MATH }
#undef MATH
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline void threadgroup_barrier(mem_flags memory, int line = __builtin_LINE()) {
  emulator::wait_for_threadgroup(int(memory), line);
}
inline void simdgroup_barrier(mem_flags memory, int line = __builtin_LINE()) {
  emulator::wait_for_simdgroup(int(memory), line);
}

// ---- what the lanes of a simdgroup do together

enum Operation { SHUFFLE, REDUCE, MULTIPLY };

template <class T> T taken(const emulator::Exchange& given, uint lane, int line) {
  if (lane > 31 || !(given.lanes >> lane & 1)) emulator::fail(line, "reads from a lane that does not exist");
  T value;
  __builtin_memcpy(&value, given.given[lane], sizeof value);
  return value;
}
template <class T> T simd_shuffle(T value, ushort lane, int line = __builtin_LINE()) {
  return taken<T>(emulator::exchange(SHUFFLE, line, &value, sizeof value), lane, line);
}
template <class T> T simd_broadcast(T value, ushort lane, int line = __builtin_LINE()) {
  return simd_shuffle(value, lane, line);
}
template <class T> T simd_shuffle_xor(T value, ushort mask, int line = __builtin_LINE()) {
  return simd_shuffle(value, emulator::current->lane ^ mask, line);
}
// Lanes without a source keep their own value.
template <class T> T simd_shuffle_down(T value, ushort by, int line = __builtin_LINE()) {
  const uint from = emulator::current->lane + by;
  return simd_shuffle(value, from < 32 ? from : emulator::current->lane, line);
}

// Pairs of lanes first, then pairs of pairs.
template <class T, class F> T reduced(T value, int line, F join) {
  const emulator::Exchange& given = emulator::exchange(REDUCE, line, &value, sizeof value);
  T values[32];
  for (int i = 0; i < 32; i++) values[i] = given.lanes >> i & 1 ? taken<T>(given, i, line) : taken<T>(given, 0, line);
  for (int step = 1; step < 32; step *= 2)
    for (int i = 0; i + step < 32; i += 2 * step)
      if (given.lanes >> (i + step) & 1) values[i] = join(values[i], values[i + step]);
  return values[0];
}
template <class T> T simd_sum(T value, int line = __builtin_LINE()) {
  return reduced(value, line, [](T a, T b) { return T(a + b); });
}
template <class T> T simd_max(T value, int line = __builtin_LINE()) {
  return reduced(value, line, [](T a, T b) { return a < b ? b : a; });
}
template <class T> T simd_min(T value, int line = __builtin_LINE()) {
  return reduced(value, line, [](T a, T b) { return b < a ? b : a; });
}

// ---- matrix units: an 8x8 matrix has two elements in each lane

template <class T, int ROWS, int COLUMNS>
struct simdgroup_matrix {
  static_assert(ROWS == 8 && COLUMNS == 8, "Metal knows 8x8 matrices only");
  vec<T, 2> elements;
  vec<T, 2>& thread_elements() { return elements; }
  // Where a lane's elements are, as MLX's kernels have it: its row, and the first of two columns.
  static int row() { return ((emulator::current->lane / 4) & 4) + (emulator::current->lane / 2) % 4; }
  static int column() { return ((emulator::current->lane / 4) & 2) * 2 + (emulator::current->lane % 2) * 2; }
  static int lane_of(int row, int column) {
    return ((row & 4) << 2) | ((column & 4) << 1) | ((row & 3) << 1) | ((column >> 1) & 1);
  }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;

template <class T, int ROWS, int COLUMNS> simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, ROWS, COLUMNS> filled;
  filled.elements = vec<T, 2>(value);
  return filled;
}
template <class T, class P>
void simdgroup_load(simdgroup_matrix<T, 8, 8>& to, const P* from, ulong stride, int line = __builtin_LINE()) {
  emulator::exchange(MULTIPLY, line, &stride, sizeof stride);  // all lanes take part
  for (int i = 0; i < 2; i++) to.elements[i] = from[to.row() * stride + to.column() + i];
}
template <class T, class P>
void simdgroup_store(simdgroup_matrix<T, 8, 8> from, P* to, ulong stride, int line = __builtin_LINE()) {
  emulator::exchange(MULTIPLY, line, &stride, sizeof stride);
  for (int i = 0; i < 2; i++) to[from.row() * stride + from.column() + i] = from.elements[i];
}
// sum = a @ b + c
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(
    simdgroup_matrix<D, 8, 8>& sum, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
    simdgroup_matrix<C, 8, 8> c, int line = __builtin_LINE()) {
  struct Both { vec<A, 2> a; vec<B, 2> b; } both{a.elements, b.elements};
  const emulator::Exchange& given = emulator::exchange(MULTIPLY, line, &both, sizeof both);
  if (given.lanes != 0xffffffff) emulator::fail(line, "matrix operations need 32 lanes");
  if (emulator::current->lane == 0) emulator::matrix_operations++;
  const int row = sum.row(), column = sum.column();
  float sums[2] = {float(c.elements[0]), float(c.elements[1])};
  for (int k = 0; k < 8; k++) {
    const Both left = taken<Both>(given, a.lane_of(row, k), line), right = taken<Both>(given, b.lane_of(k, column), line);
    for (int i = 0; i < 2; i++) sums[i] += float(left.a[k % 2]) * float(right.b[i]);
  }
  sum.elements = vec<D, 2>(D(sums[0]), D(sums[1]));
}

}  // namespace metal

using namespace metal;
