#include "ops/binding.h"
#include "ops/ops.h"

namespace ls {
namespace {

constexpr const char* kOp = "product";

void check_matrix(const char* name, const Tensor& t, int64_t n_rows, int64_t n_cols, const Tensor& a) {
  LS_CHECK(t.dim() == 2 && t.size(0) == n_rows && t.size(1) == n_cols, kOp, ": ", name, " must have shape (", n_rows, ", ",
           n_cols, "), got ", shape_of(t));
  check_device(kOp, name, t, a);
}

}  // namespace

void product(const Tensor& a, const Tensor& b, const OptionalTensor& any_bias, const Tensor& out, double alpha, bool add) {
  LS_CHECK(a.dim() == 2 && b.dim() == 2, kOp, ": a and b must have shapes (N, K) and (K, M), got ", shape_of(a), " and ",
           shape_of(b));
  Product p{};
  p.n_rows = a.size(0), p.n_k = a.size(1), p.n_cols = b.size(1);
  check_matrix("b", b, p.n_k, p.n_cols, a);
  check_matrix("out", out, p.n_rows, p.n_cols, a);
  p.dtype = dtype_of(kOp, "a", a), p.out_dtype = dtype_of(kOp, "out", out);
  check_dtype(kOp, "b", b, a.scalar_type());
  LS_CHECK(p.out_dtype == p.dtype || p.out_dtype == DType::kFloat32, kOp, ": out must be of a's dtype or float32, got ",
           torch::headeronly::toString(out.scalar_type()));
  LS_CHECK(out.stride(1) == 1 || p.n_cols <= 1, kOp, ": out must have stride 1 in its last dimension, got ", out.stride(1));
  const OptionalTensor bias = row_vector(kOp, "bias", any_bias, b);
  p.a = in_strided(a, "a"), p.b = in_strided(b, "b"), p.bias = in(bias, "bias"), p.out = out.mutable_data_ptr();
  p.a_row_stride = a.stride(0), p.a_k_stride = a.stride(1), p.b_k_stride = b.stride(0), p.b_col_stride = b.stride(1);
  p.out_row_stride = out.stride(0);
  p.alpha = static_cast<float>(alpha), p.add = add;
  cpu::product(p);
}

}  // namespace ls
