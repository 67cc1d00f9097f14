import mlx.core as mx
import pytest

from dflash_mlx.constants import constant


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [(7, mx.int32, ()), (49151, mx.uint32, (2, 15)), (True, mx.bool_, (1, 1)), (0, mx.int32, (3,))],
)
def test_a_constant_holds_its_value_everywhere_and_is_the_same_array(value, dtype, shape):
    found = constant(value, dtype, shape)
    assert (found.dtype, found.shape) == (dtype, shape)
    assert (found == value).all()
    assert constant(value, dtype, shape) is found


def test_a_constant_may_be_made_while_mlx_writes_down_a_computation():
    computed = mx.compile(lambda x: x + constant(31, mx.int32, (1, 2)))
    assert computed(mx.array([[1, 2]])).tolist() == [[32, 33]]
    assert constant(31, mx.int32, (1, 2)).tolist() == [[31, 31]]


def test_equal_values_of_other_types_are_other_arrays():
    """1 and True are equal, too."""
    assert constant(1, mx.int32).dtype == mx.int32
    assert constant(1, mx.uint32).dtype == mx.uint32
    assert constant(True, mx.bool_).dtype == mx.bool_
