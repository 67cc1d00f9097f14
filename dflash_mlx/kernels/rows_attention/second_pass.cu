// The second pass: a thread puts the parts of one number of a row together, as in second_pass.metal.

constexpr float NEVER = -3e38f;
const int splits = marks_shape[3];
const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, row = i / D;
if (row >= static_cast<int64_t>(marks_shape[0]) * marks_shape[1] * marks_shape[2]) return;

float highest = NEVER, total = 0, sum = 0;
for (int split = 0; split < splits; split++) {
  const int64_t at = row * splits + split;
  const float top = max(highest, marks[2 * at]), before = exp2f(highest - top), now = exp2f(marks[2 * at] - top);
  total = total * before + marks[2 * at + 1] * now;
  sum = sum * before + sums[at * D + i % D] * now;
  highest = top;
}
out[i] = static_cast<T>(total > 0 ? sum / total : 0.0f);
