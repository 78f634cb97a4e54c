"""The operators' schemas.

They are defined in Python so that fakes, export and machines without a compiled library never
depend on one being loaded. ``csrc/ops.h`` has the contract of the operators that begin with an
underscore: the compiled libraries implement those, ``convnormpool.ops`` the others.
"""

from __future__ import annotations

import torch

__all__ = ["LIBRARY"]

LIBRARY = torch.library.Library("convnormpool", "DEF")

_CONV = "int[] stride, int[] padding, int[] dilation, int groups"

_PUBLIC = (
    "act_moments(Tensor y, str activation) -> (Tensor mean, Tensor m2)",
    "act_moments_backward(Tensor grad_mean, Tensor grad_m2, Tensor y, Tensor mean, "
    "str activation) -> Tensor",
    "group_norm_pool(Tensor mean, Tensor m2, SymInt count, Tensor? weight, Tensor? bias, "
    "int num_groups, float eps, str? dtype=None) "
    "-> (Tensor out, Tensor group_mean, Tensor group_rstd)",
    "group_norm_pool_backward(Tensor grad_out, Tensor mean, Tensor m2, SymInt count, "
    "Tensor? weight, Tensor? bias, int num_groups, float eps, bool[3] output_mask) "
    "-> (Tensor grad_mean, Tensor grad_m2, Tensor grad_weight, Tensor grad_bias)",
    f"conv_act_moments(Tensor x, Tensor w, Tensor? b, {_CONV}, str activation, str precision, "
    "str path) -> (Tensor mean, Tensor m2)",
    "conv_act_moments_backward(Tensor grad_mean, Tensor grad_m2, Tensor x, Tensor w, Tensor? b, "
    f"Tensor mean, Tensor m2, {_CONV}, str activation, str precision, str path, "
    "bool[3] output_mask) "
    "-> (Tensor grad_x, Tensor grad_w, Tensor grad_b)",
    f"conv_weight_grad(Tensor dy, Tensor x, int[] size, {_CONV}, bool allow_tf32) -> Tensor",
)

_COMPILED = (
    "_act_moments_out(Tensor y, int activation, Tensor(a!) mean, Tensor(b!) m2, "
    "Tensor(c!)? workspace) -> ()",
    "_act_moments_backward_out(Tensor y, Tensor mean, Tensor grad_mean, Tensor grad_m2, "
    "int activation, Tensor(a!) dy) -> ()",
    "_group_norm_pool_out(Tensor mean, Tensor m2, int count, Tensor? weight, Tensor? bias, "
    "int num_groups, float eps, Tensor(a!) out, Tensor(b!) group_mean, "
    "Tensor(c!) group_rstd) -> ()",
    "_group_norm_pool_backward_out(Tensor grad_out, Tensor mean, Tensor m2, Tensor? weight, "
    "int count, int num_groups, float eps, Tensor(a!)? grad_mean, Tensor(b!)? grad_m2, "
    "Tensor(c!)? grad_weight, Tensor(d!)? grad_bias) -> ()",
    f"_conv_act_moments_out(Tensor x, Tensor w, Tensor? b, {_CONV}, int activation, "
    "int precision, bool wgmma, Tensor(a!) mean, Tensor(b!) m2, Tensor(c!)? workspace) -> ()",
    f"_conv_norm_pool_out(Tensor x, Tensor w, Tensor? b, {_CONV}, int activation, "
    "int precision, bool wgmma, Tensor? norm_weight, Tensor? norm_bias, int num_groups, "
    "float eps, Tensor(a!) out, Tensor(b!) mean, Tensor(c!) m2, Tensor(d!)? workspace) -> ()",
    "_conv_act_moments_backward_out(Tensor x, Tensor w, Tensor? b, Tensor mean, Tensor m2, "
    f"Tensor grad_mean, Tensor grad_m2, {_CONV}, int activation, int precision, "
    "bool wgmma, Tensor(a!)? dx, Tensor(b!)? dw, Tensor(c!)? db, Tensor(d!)? workspace) -> ()",
    "_to_channels_last_out(Tensor x, Tensor(a!) out) -> ()",
    "_unfold_depth_out(Tensor x, int filter, int stride, int padding, int dilation, "
    "Tensor(a!) out) -> ()",
    "_fold_depth_out(Tensor du, int filter, int stride, int padding, int dilation, "
    "Tensor(a!) dx) -> ()",
)

for _schema in _PUBLIC:
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
for _schema in _COMPILED:
    LIBRARY.define(_schema)
