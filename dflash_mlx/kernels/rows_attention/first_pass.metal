// Attention of a few rows over a cache, the first of two passes: the body of a Metal kernel (passes.py launches it,
// docs/kernels.md derives it).
//
// q (B, heads, L, D), k and v (B, groups, S, D) of type T, wherever they lie in larger arrays. The rows of a threadgroup
// are query rows, of all the heads that share a head of keys: eight for each simdgroup. It computes them over one part
// of the cache, POSITIONS long, tile by tile: a highest score and a sum of weights (marks), and weighted values (sums).
// What lies in parts that a row does not see changes none of its numbers.

typedef vec<T, 2> Two;
typedef vec<T, 4> Four;
constexpr float NEVER = -3e38f;
// A tile has so many fours of keys. A thread reads some of them before it stores the first: reading takes long.
constexpr int FOURS = KEYS * (D / 4), AT_ONCE = 4;
// Eight more, so that lanes that read at once use different banks.
threadgroup Two keys[KEYS][D / 2 + 4];
threadgroup Two values[KEYS][D / 2 + 4];

const int heads = q_shape[1], rows = q_shape[2], groups = k_shape[1], length = k_shape[2], share = heads / groups;
const int threads = threads_per_threadgroup.x, splits = (length + POSITIONS - 1) / POSITIONS;
const int split = threadgroup_position_in_grid.y, start = split * POSITIONS, end = min(start + POSITIONS, length);
const int answer = threadgroup_position_in_grid.z / groups, group = threadgroup_position_in_grid.z % groups;

const device T* all_keys = k + answer * k_strides[0] + group * k_strides[1];
const device T* all_values = v + answer * v_strides[0] + group * v_strides[1];

// An 8x8 matrix has two elements in each lane: of this row, in this column and the next.
const int lane = thread_index_in_simdgroup;
const int row = ((lane / 4) & 4) + (lane / 2) % 4;
const int column = ((lane / 4) & 2) * 2 + (lane % 2) * 2;
const int place = (threadgroup_position_in_grid.x * threads + simdgroup_index_in_threadgroup * 32) / 4 + row;
const bool used = place < rows * share;
const int query = place / share, head = group * share + place % share;

const float scale = settings[0] * 1.44269504089f;  // for powers of two
const int kind = static_cast<int>(settings[1]), last = kind == CAUSAL ? length - rows + query : length - 1;

// The depth of a product may be walked in any order, if both factors are. Here place p of step 2 j + i stands for number
// 16 j + 2 p + i, so that a lane reads numbers that lie side by side.
Four queries[D / 16];
#pragma unroll
for (int j = 0; j < D / 16; j++)
  queries[j] = used ? four(q + answer * q_strides[0] + head * q_strides[1] + query * q_strides[2] +
                               (16 * j + 2 * column) * q_strides[3], q_strides[3])
                    : Four(T(0));

float highest = NEVER, total = 0;
simdgroup_matrix<float, 8, 8> sums_of[D / 8];
#pragma unroll
for (int d = 0; d < D / 8; d++) sums_of[d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);

for (int first = start; first < end; first += KEYS) {
  for (int begin = thread_index_in_threadgroup; begin < FOURS; begin += AT_ONCE * threads) {
    Four key[AT_ONCE], value[AT_ONCE];
    #pragma unroll
    for (int a = 0; a < AT_ONCE; a++) {
      const int i = begin + a * threads, n = first + i / (D / 4), d = i % (D / 4) * 4;
      key[a] = Four(T(0));
      value[a] = Four(T(0));
      if (i < FOURS && n < end) {
        key[a] = four(all_keys + n * k_strides[2] + d * k_strides[3], k_strides[3]);
        value[a] = four(all_values + n * v_strides[2] + d * v_strides[3], v_strides[3]);
      }
    }
    #pragma unroll
    for (int a = 0; a < AT_ONCE; a++) {
      const int i = begin + a * threads, n = i / (D / 4), d = i % (D / 4) * 2;
      if (i >= FOURS) continue;
      const Two of_keys[2] = {{key[a].x, key[a].y}, {key[a].z, key[a].w}};
      const Two of_values[2] = {{value[a].x, value[a].y}, {value[a].z, value[a].w}};
      #pragma unroll
      for (int two = 0; two < 2; two++) {
        keys[n][d + two] = of_keys[two];
        values[n][d + two] = of_values[two];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  simdgroup_matrix<float, 8, 8> scores[KEYS / 8];
  #pragma unroll
  for (int t = 0; t < KEYS / 8; t++) scores[t] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  #pragma unroll
  for (int j = 0; j < D / 16; j++) {
    simdgroup_matrix<float, 8, 8> left[2], right;
    #pragma unroll
    for (int i = 0; i < 2; i++)
      reinterpret_cast<thread float2&>(left[i].thread_elements()) =
          float2(static_cast<float>(queries[j][i]), static_cast<float>(queries[j][i + 2]));
    #pragma unroll
    for (int t = 0; t < KEYS / 8; t++) {
      const Two one = keys[8 * t + column][8 * j + row], other = keys[8 * t + column + 1][8 * j + row];
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        reinterpret_cast<thread float2&>(right.thread_elements()) =
            float2(static_cast<float>(one[i]), static_cast<float>(other[i]));
        simdgroup_multiply_accumulate(scores[t], left[i], right, scores[t]);
      }
    }
  }

  // Scores become weights, relative to the highest score so far. The lanes of a row are those that differ in bits 0 and 3.
  float top = highest;
  #pragma unroll
  for (int t = 0; t < KEYS / 8; t++) {
    thread float2& both = reinterpret_cast<thread float2&>(scores[t].thread_elements());
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const int n = first + 8 * t + column + i;
      const bool seen = used && n <= last &&
          (kind != MASK || mask[answer * mask_strides[0] + query * mask_strides[2] + n * mask_strides[3]]);
      both[i] = seen ? both[i] * scale : NEVER;
      top = max(top, both[i]);
    }
  }
  top = max(top, simd_shuffle_xor(top, 1));
  top = max(top, simd_shuffle_xor(top, 8));
  float weight = 0;
  #pragma unroll
  for (int t = 0; t < KEYS / 8; t++) {
    thread float2& both = reinterpret_cast<thread float2&>(scores[t].thread_elements());
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      both[i] = both[i] == NEVER ? 0.0f : exp2(both[i] - top);
      weight += both[i];
    }
  }
  weight += simd_shuffle_xor(weight, 1);
  weight += simd_shuffle_xor(weight, 8);
  const float before = exp2(highest - top);
  highest = top;
  total = total * before + weight;

  #pragma unroll
  for (int d = 0; d < D / 8; d++) {
    thread float2& both = reinterpret_cast<thread float2&>(sums_of[d].thread_elements());
    both = float2(both[0] * before, both[1] * before);
    #pragma unroll
    for (int t = 0; t < KEYS / 8; t++) {
      const Two two = values[8 * t + row][4 * d + column / 2];
      simdgroup_matrix<float, 8, 8> right;
      reinterpret_cast<thread float2&>(right.thread_elements()) =
          float2(static_cast<float>(two[0]), static_cast<float>(two[1]));
      simdgroup_multiply_accumulate(sums_of[d], scores[t], right, sums_of[d]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

if (used) {
  const ulong at = ((ulong(answer) * rows + query) * heads + head) * splits + split;
  if (column == 0) {
    marks[2 * at] = highest;
    marks[2 * at + 1] = total;
  }
  #pragma unroll
  for (int d = 0; d < D / 8; d++) {
    const float2 both = reinterpret_cast<thread float2&>(sums_of[d].thread_elements());
    sums[at * D + 8 * d + column] = both[0];
    sums[at * D + 8 * d + column + 1] = both[1];
  }
}
