// A few rows times a quantized matrix: the body of a CUDA kernel, by the algorithm of kernel.metal.
//
// A GPU's matrix units take 16 rows, 16 places of depth and 8 columns here, and numbers of type T: weights are rounded
// to it, as in MLX's own products of many rows. A block computes 16 rows of 8 * TILES columns. Its SPLIT warps share the
// depth, block by block in turns. multiply_accumulate is in the header (product.py).

constexpr int CHUNK = 128 / BITS;  // weights of a column that a lane reads at once, 16 bytes: all in one group
constexpr int IN_WORD = 32 / BITS;
constexpr int BLOCK = 4 * CHUNK;
constexpr int COLUMNS = 8 * TILES;
struct alignas(16) Words { uint32_t at[4]; };
struct alignas(2 * IN_WORD) Numbers { T at[IN_WORD]; };
struct alignas(4) Two { T at[2]; };
__shared__ float partial[SPLIT][16][COLUMNS];

const int rows = x_shape[0], depth = x_shape[1], columns = w_shape[0];
const int first_row = blockIdx.x * 16, first_column = blockIdx.y * COLUMNS;
const int part = threadIdx.x / 32, lane = threadIdx.x % 32;
// A lane has two rows of x, eight apart, one column of w, and a chunk of depth.
const int line = lane / 4, chunk = lane % 4;

auto bits = [](float first, float second) {
  const Two two = {{static_cast<T>(first), static_cast<T>(second)}};
  uint32_t word;
  memcpy(&word, &two, 4);
  return word;
};

float sums[TILES][4];
#pragma unroll
for (int tile = 0; tile < TILES; tile++)
  for (int i = 0; i < 4; i++) sums[tile][i] = 0;

for (int start = part * BLOCK; start < depth; start += SPLIT * BLOCK) {
  const int at = start + chunk * CHUNK;
  Words packed[TILES];
  float scale[TILES], bias[TILES];
  #pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    const int n = first_column + 8 * tile + line;
    packed[tile] = Words{{0, 0, 0, 0}};
    scale[tile] = bias[tile] = 0;
    if (n < columns && at < depth) {
      const int64_t weight = static_cast<int64_t>(n) * depth + at;
      packed[tile] = *reinterpret_cast<const Words*>(w + weight / IN_WORD);
      scale[tile] = static_cast<float>(scales[weight / GROUP]);
      bias[tile] = static_cast<float>(biases[weight / GROUP]);
    }
  }
  #pragma unroll
  for (int word = 0; word < 4; word++) {
    Numbers numbers[2];
    #pragma unroll
    for (int eight = 0; eight < 2; eight++) {
      const int m = first_row + 8 * eight + line;
      for (int j = 0; j < IN_WORD; j++) numbers[eight].at[j] = static_cast<T>(0.0f);
      if (m < rows && at < depth)
        numbers[eight] = *reinterpret_cast<const Numbers*>(x + static_cast<int64_t>(m) * depth + at + word * IN_WORD);
    }
    // Each step takes four places of every chunk.
    #pragma unroll
    for (int s = 0; s < IN_WORD; s += 4) {
      uint32_t left[4];
      for (int eight = 0; eight < 2; eight++)
        for (int i = 0; i < 2; i++) memcpy(&left[eight + 2 * i], &numbers[eight].at[s + 2 * i], 4);
      #pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        float weights[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint32_t number = (packed[tile].at[word] >> (BITS * (s + i))) & ((1u << BITS) - 1);
          weights[i] = scale[tile] * static_cast<float>(number) + bias[tile];
        }
        const uint32_t right[2] = {bits(weights[0], weights[1]), bits(weights[2], weights[3])};
        multiply_accumulate<BRAIN>(sums[tile], left, right);
      }
    }
  }
}

// The parts are added in the same order each time.
#pragma unroll
for (int tile = 0; tile < TILES; tile++)
  for (int i = 0; i < 4; i++) partial[part][line + 8 * (i / 2)][8 * tile + 2 * chunk + i % 2] = sums[tile][i];
__syncthreads();
for (int i = threadIdx.x; i < 16 * COLUMNS; i += 32 * SPLIT) {
  const int m = first_row + i / COLUMNS, n = first_column + i % COLUMNS;
  float sum = 0;
  for (int p = 0; p < SPLIT; p++) sum += partial[p][i / COLUMNS][i % COLUMNS];
  if (m < rows && n < columns) y[static_cast<int64_t>(m) * columns + n] = static_cast<T>(sum);
}
