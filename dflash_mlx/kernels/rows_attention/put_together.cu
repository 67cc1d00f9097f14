// Attention that was computed in parts, put together: the body of a CUDA kernel (on_matrix_units.py).
//
// A block of D threads has a row of a query head. Of each part it has the weighted values' sums, the highest score, in
// powers of two, and the sum of the weights relative to it. The parts are added in order, so that a row's numbers are
// always the same; one in which the row sees nothing has no weight.

const int number = parts_shape[1], rows = parts_shape[2], answer = blockIdx.y, d = threadIdx.x;
const float* first = parts + (static_cast<int64_t>(answer) * number * rows + blockIdx.x) * (D + 2);
const int64_t step = static_cast<int64_t>(rows) * (D + 2);

float top = -3e38f, sum = 0, weights = 0;
for (int i = 0; i < number; i++) top = max(top, first[i * step + D]);
#pragma unroll 4
for (int i = 0; i < number; i++) {
  const float share = exp2f(first[i * step + D] - top);
  sum += share * first[i * step + d];
  weights += share * first[i * step + D + 1];
}
out[(static_cast<int64_t>(answer) * rows + blockIdx.x) * D + d] = static_cast<T>(weights > 0 ? sum / weights : 0);
