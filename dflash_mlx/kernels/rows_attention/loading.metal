// Four numbers of an array, from some place on, where the next one is `step` further.
template <class T>
METAL_FUNC vec<T, 4> four(const device T* from, int64_t step) {
  if (step == 1) return *reinterpret_cast<const device vec<T, 4>*>(from);
  const vec<T, 4> numbers = {from[0], from[step], from[2 * step], from[3 * step]};
  return numbers;
}
