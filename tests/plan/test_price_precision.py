"""Prices follow the dtype that kernels really multiply in."""

import pytest
import torch
import transformers

import shardwright as sw
from shardwright.cluster.catalogue import DEVICES
from shardwright.cost import LocalCall, LocalTensor, op_time
from shardwright.errors import InputError
from shardwright.ir import Op
from shardwright.parallelize import plan as make_plan

FLOAT8 = {"base": "bf16-mixed", "matmul": "float8"}
SCALARS = sw.CompileOptions(outputs="scalars")


def predicted(module, ids, precision, cluster):
    example = ((ids,), {"labels": ids, "use_cache": False})
    plan = make_plan(module, example=example, plan="dp=2", cluster=cluster, precision=precision, compile=SCALARS)
    return plan.predicted["train"]


@pytest.fixture(scope="module")
def mixtral():
    config = transformers.MixtralConfig(
        vocab_size=128, hidden_size=1024, intermediate_size=2048, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=8, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=1024,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.MixtralForCausalLM(config).train(), torch.zeros(8, 1024, dtype=torch.int64)


def test_experts_compute_in_the_dtype_of_autocast(mixtral):
    """A100: 312 TFLOP/s in bfloat16, 19.5 in float32."""
    full, mixed = (predicted(*mixtral, precision, "2xA100-80GB") for precision in ("fp32", "bf16-mixed"))
    experts = [next(op["seconds"] for op in each["ops"] if "experts" in op["name"]) for each in (full, mixed)]
    assert experts[1] < experts[0] / 8
    utilization = [each["throughput"]["mfu"] for each in (full, mixed)]
    assert min(utilization) > 0.1 and max(utilization) < 1


def linear_time(device, side, multiplies_in):
    x = LocalTensor(elements=side * side, item=2, dtype="bfloat16", gradient=True)
    op = Op(name="up / linear", target="aten.linear.default", inputs=("x", "w"), outputs=("y",))
    call = LocalCall(op=op, flops=2.0 * side**3, inputs=(x, x), outputs=(x,), multiplies_in=multiplies_in)
    return op_time(call, DEVICES[device]).forward


def test_large_linear_layers_in_float8_are_faster_where_the_device_has_it():
    """Small ones are not: what they multiply is cast first."""
    assert linear_time("H100", 16384, "float8") < 0.6 * linear_time("H100", 16384, None)
    assert linear_time("H100", 512, "float8") > linear_time("H100", 512, None)
    assert linear_time("A100-80GB", 16384, "float8") == linear_time("A100-80GB", 16384, None)


def test_a_plan_for_float8_says_so(mixtral):
    wide, narrow = (predicted(*mixtral, precision, "2xH100") for precision in ("bf16-mixed", FLOAT8))
    assert narrow["for"]["precision"] == "bf16-mixed, matmuls in float8"
    assert narrow["compute"] != wide["compute"]  # linear layers are narrow by autocast


def test_float8_is_not_run():
    with pytest.raises(InputError, match=r"can be planned for .* and not run"):
        sw.parallelize(torch.nn.Linear(4, 4), plan="single", precision=FLOAT8)
    with pytest.raises(InputError, match="only 'float8' is known"):
        sw.plan(torch.nn.Linear(4, 4), example=(torch.zeros(2, 4),), cluster="2xH100", precision={"matmul": "float4"})
