// What kernels use of the Metal Shading Language, as declarations for `clang++ -fsyntax-only`: with Metal's address
// spaces, which g++ does not know. A pointer to device memory is no pointer to a threadgroup's. half and bfloat are
// float here: this is not about numbers.
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef int int32_t;
typedef long int64_t;
typedef float half, float16_t, bfloat, bfloat16_t;
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define METAL_FUNC inline
namespace metal {
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
typedef vec<float, 2> float2;
typedef vec<float, 4> float4;
typedef vec<uint, 2> uint2;
typedef vec<uint, 3> uint3;
typedef vec<uint, 4> uint4;
float2 pair(float, float);
float exp(float);
float exp2(float);
float max(float, float);
int min(int, int);
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <class T> T simd_sum(T);
template <class T> T simd_max(T);
template <class T> T simd_shuffle(T, ushort);
template <class T> T simd_shuffle_xor(T, ushort);
template <class T, int ROWS, int COLUMNS> struct simdgroup_matrix { vec<T, 2>& thread_elements(); };
template <class T, int ROWS, int COLUMNS> simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T);
template <class T> void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const device T*, ulong);
template <class T> void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const threadgroup T*, ulong);
template <class T> void simdgroup_store(simdgroup_matrix<T, 8, 8>, device T*, ulong);
template <class T> void simdgroup_store(simdgroup_matrix<T, 8, 8>, threadgroup T*, ulong);
template <class A, class B>
void simdgroup_multiply_accumulate(simdgroup_matrix<float, 8, 8>&, A, B, simdgroup_matrix<float, 8, 8>);
}  // namespace metal
using namespace metal;
// clang makes vectors of several numbers in OpenCL only.
#define float2(...) pair(__VA_ARGS__)
