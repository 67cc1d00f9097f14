// Rotary embedding of rows that have a position each: the body of a CUDA kernel (launches.py). A thread turns a pair.

const int rows = x_shape[2], size = x_shape[3], half = size / 2;
const int at = blockIdx.x * THREADS + threadIdx.x;
const int pair = at % half, row = at / half % rows, head = at / half / rows;
if (head < x_shape[1]) {
  const int first = TRADITIONAL ? 2 * pair : pair, second = TRADITIONAL ? first + 1 : pair + half;
  const T* from = x + head * x_strides[1] + row * x_strides[2];
  const float angle = static_cast<float>(positions[row]) * rates[pair];
  const float a = static_cast<float>(from[first * x_strides[3]]), b = static_cast<float>(from[second * x_strides[3]]);
  T* to = rotated + (static_cast<int64_t>(head) * rows + row) * size;
  to[first] = static_cast<T>(a * cosf(angle) - b * sinf(angle));
  to[second] = static_cast<T>(a * sinf(angle) + b * cosf(angle));
}
