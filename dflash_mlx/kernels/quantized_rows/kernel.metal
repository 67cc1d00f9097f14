// A few rows times a quantized matrix: the body of a Metal kernel (product.py launches it, docs/kernels.md derives it).
//
// y = x @ dequantize(w).T: x (M, K) of type T, w (N, K) in BITS bits, a scale and a bias for each GROUP weights of a
// row, y (M, N). A threadgroup computes ROWS rows of 8 * TILES columns. Its SPLIT simdgroups share the depth, K: block
// by block in turns. Only the device knows how many rows there are; what is outside counts as zero.

constexpr int CHUNK = 128 / BITS;  // weights of a row that a lane reads at once, 16 bytes: all in one group
constexpr int IN_WORD = 32 / BITS;
constexpr int BLOCK = 8 * CHUNK;
constexpr int COLUMNS = 8 * TILES;
threadgroup float partial[SPLIT][ROWS][COLUMNS];

const int rows = x_shape[0], depth = x_shape[1], columns = w_shape[0];
const int first_row = threadgroup_position_in_grid.x * ROWS;
const int first_column = threadgroup_position_in_grid.y * COLUMNS;
const int part = simdgroup_index_in_threadgroup;

// An 8x8 matrix has two elements in each lane: of this row, in this column and the next.
const int lane = thread_index_in_simdgroup;
const int row = ((lane / 4) & 4) + (lane / 2) % 4;
const int column = ((lane / 4) & 2) * 2 + (lane % 2) * 2;

simdgroup_matrix<float, 8, 8> sums[ROWS / 8][TILES];
#pragma unroll
for (int r = 0; r < ROWS / 8; r++)
  #pragma unroll
  for (int tile = 0; tile < TILES; tile++)
    sums[r][tile] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);

// The depth of a product may be walked in any order, if both factors are. Here place k of the step for weight s of a
// chunk stands for weight s of the block's chunk k. So each lane reads whole chunks of x and of w, and needs no other's.
for (int start = part * BLOCK; start < depth; start += SPLIT * BLOCK) {
  uint4 packed[TILES][2];
  float scale[TILES][2], bias[TILES][2];
  const int at = start + row * CHUNK;
  #pragma unroll
  for (int tile = 0; tile < TILES; tile++)
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const int n = first_column + 8 * tile + column + i;
      packed[tile][i] = uint4(0);
      scale[tile][i] = 0;
      bias[tile][i] = 0;
      if (n < columns && at < depth) {
        const ulong weight = ulong(n) * depth + at;
        packed[tile][i] = *reinterpret_cast<const device uint4*>(w + weight / IN_WORD);
        scale[tile][i] = static_cast<float>(scales[weight / GROUP]);
        bias[tile][i] = static_cast<float>(biases[weight / GROUP]);
      }
    }
  #pragma unroll
  for (int word = 0; word < 4; word++) {
    vec<T, 4> numbers[ROWS / 8][2][IN_WORD / 4];
    #pragma unroll
    for (int r = 0; r < ROWS / 8; r++)
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        const int m = first_row + 8 * r + row, k = start + (column + i) * CHUNK + word * IN_WORD;
        #pragma unroll
        for (int four = 0; four < IN_WORD / 4; four++) {
          numbers[r][i][four] = vec<T, 4>(T(0));
          if (m < rows && k < depth)
            numbers[r][i][four] = *reinterpret_cast<const device vec<T, 4>*>(x + ulong(m) * depth + k + 4 * four);
        }
      }
    #pragma unroll
    for (int s = 0; s < IN_WORD; s++) {
      simdgroup_matrix<float, 8, 8> left[ROWS / 8];
      #pragma unroll
      for (int r = 0; r < ROWS / 8; r++)
        reinterpret_cast<thread float2&>(left[r].thread_elements()) = float2(
            static_cast<float>(numbers[r][0][s / 4][s % 4]), static_cast<float>(numbers[r][1][s / 4][s % 4]));
      #pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        // Taken out and dequantized once, for all rows.
        float weights[2];
        #pragma unroll
        for (int i = 0; i < 2; i++) {
          const uint number = (packed[tile][i][word] >> (BITS * s)) & ((1u << BITS) - 1);
          weights[i] = scale[tile][i] * static_cast<float>(number) + bias[tile][i];
        }
        simdgroup_matrix<float, 8, 8> right;
        reinterpret_cast<thread float2&>(right.thread_elements()) = float2(weights[0], weights[1]);
        #pragma unroll
        for (int r = 0; r < ROWS / 8; r++)
          simdgroup_multiply_accumulate(sums[r][tile], left[r], right, sums[r][tile]);
      }
    }
  }
}

// The parts are added in the same order each time.
#pragma unroll
for (int r = 0; r < ROWS / 8; r++)
  #pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    const float2 sum = reinterpret_cast<thread float2&>(sums[r][tile].thread_elements());
    partial[part][8 * r + row][8 * tile + column] = sum[0];
    partial[part][8 * r + row][8 * tile + column + 1] = sum[1];
  }
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int i = thread_index_in_threadgroup; i < ROWS * COLUMNS; i += 32 * SPLIT) {
  const int m = first_row + i / COLUMNS, n = first_column + i % COLUMNS;
  float sum = 0;
  for (int p = 0; p < SPLIT; p++) sum += partial[p][i / COLUMNS][i % COLUMNS];
  if (m < rows && n < columns) y[ulong(m) * columns + n] = static_cast<T>(sum);
}
