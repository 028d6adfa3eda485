"""Recorded calls and their building, as a LiBai user knows them."""

from __future__ import annotations

import functools

import pytest
from omegaconf import DictConfig, ListConfig, OmegaConf

from dufu.config import LazyCall, configurable, instantiate
from dufu.config.lazy import as_config
from dufu.errors import ConfigError
from tests.config.targets import Keeper, Point, Renamed, Sized, Typed, add, area, fails, make_adder


def test_a_call_is_recorded_and_made_later_with_its_arguments_first() -> None:
    call = LazyCall(Keeper)(inner=LazyCall(add)(a=2), many=[LazyCall(add)(a=5, b=5), 7])
    assert isinstance(call, DictConfig)
    assert call._target_ == "tests.config.targets.Keeper"
    call.inner.b = 40
    built = instantiate(call)
    assert built.given["inner"] == 42
    assert isinstance(built.given["many"], ListConfig)
    assert built.given["many"] == [10, 7]


def test_a_call_takes_a_name_a_callable_or_a_call_and_nothing_else() -> None:
    LazyCall(add)()
    assert instantiate(LazyCall("tests.config.targets.add")(a=1)) == 2
    with pytest.raises(TypeError, match="LazyCall"):
        LazyCall(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="keyword"):
        LazyCall(add)(3)


def test_a_target_may_be_a_call_that_yields_it() -> None:
    assert instantiate(LazyCall(LazyCall(make_adder)(b=10))(a=5)) == 15


def test_without_recursion_arguments_stay_as_they_were_recorded() -> None:
    call = LazyCall(Keeper)(inner=LazyCall(add)(a=2), _recursive_=False)
    built = instantiate(call)
    assert built.given["inner"]._target_ == "tests.config.targets.add"
    assert "_recursive_" not in built.given


def test_values_and_instances_pass_by_identity() -> None:
    thing = Keeper()
    assert instantiate(thing) is thing
    assert instantiate(LazyCall(Keeper)(a=thing)).given["a"] is thing
    assert instantiate([thing])[0] is thing
    assert isinstance(instantiate([1]), list)
    plain = as_config({"a": 1})
    assert instantiate(plain) is plain


def test_built_items_of_a_list_keep_their_identity() -> None:
    built = instantiate(as_config([LazyCall(Keeper)(), LazyCall(Point)(x=1)]))
    assert isinstance(built[0], Keeper)
    assert built[1] == Point(1)
    assert isinstance(built[1], Point)


def test_interpolation_reaches_siblings_and_parents() -> None:
    cfg = as_config({"width": 8, "call": LazyCall(Keeper)(a="${..width}", b=dict(c="${...width}"), d="${.a}")})
    given = instantiate(cfg.call).given
    assert (given["a"], given["b"].c, given["d"]) == (8, 8, 8)
    with pytest.raises(ConfigError, match="nowhere"):
        instantiate(as_config({"call": LazyCall(Keeper)(a="${..nowhere}")}).call)


def test_a_dataclass_is_a_value_and_a_target() -> None:
    call = LazyCall(Keeper)(p=Point(3, 0.5, ["t"]), q=LazyCall(Point)(x=1))
    given = instantiate(call).given
    assert given["p"] == Point(3, 0.5, ["t"])
    assert isinstance(given["p"], Point)
    assert given["q"] == Point(1)
    assert instantiate(OmegaConf.structured(Point(7))) == Point(7)


def test_given_arguments_override_recorded_ones() -> None:
    assert instantiate(LazyCall(add)(a=1, b=2), b=10) == 11
    with pytest.raises(ConfigError, match="not a recorded call"):
        instantiate({"a": 1}, b=2)


def test_errors_name_the_target() -> None:
    with pytest.raises(ConfigError, match=r"targets\.add: .*'c'"):
        instantiate(LazyCall(add)(a=1, c=2))
    with pytest.raises(ConfigError, match=r"targets\.add: missing.*'a'"):
        instantiate(LazyCall(add)())
    with pytest.raises(ConfigError, match=r"targets\.fails: a is 3"):
        instantiate(LazyCall(fails)(a=3))
    with pytest.raises(TypeError, match=r"while building tests\.config\.targets\.add"):
        instantiate(LazyCall(add)(a="x"))


def test_an_init_takes_one_cfg_or_its_arguments() -> None:
    assert Sized(size=3).depth == Sized(as_config({"size": 3})).depth == 2
    built = instantiate(LazyCall(Sized)(cfg=dict(size=4, depth=5), depth=6))
    assert (built.size, built.depth) == (4, 6)
    assert instantiate(LazyCall(Renamed)(cfg=dict(width=4))).size == 8
    assert instantiate(LazyCall(Renamed)(size=4)).size == 4
    assert instantiate(LazyCall(Sized)(cfg=dict(size=LazyCall(add)(a=4, b=1), depth="${.size.b}"))).size == 5
    with pytest.raises(ConfigError, match=r"targets\.Sized: .*'wide'"):
        instantiate(LazyCall(Sized)(cfg=dict(size=4, wide=5)))


def test_a_function_may_read_a_cfg_and_from_config_may_take_more() -> None:
    assert area(as_config({"side": 3})) == area(width=3, height=3) == 9
    assert area(as_config({"side": 3}), stretch=2, height=5) == 30
    assert instantiate(LazyCall(area)(cfg=dict(side=4))) == 16
    with pytest.raises(TypeError, match="first parameter is cfg"):
        configurable(from_config=lambda config: config)


def test_what_has_no_importable_name_is_refused_when_it_is_recorded() -> None:
    with pytest.raises(ConfigError, match="importable"):
        LazyCall(lambda: 3)()
    with pytest.raises(ConfigError, match="importable"):
        LazyCall(functools.partial(add, 1))()

    class Local:
        pass

    with pytest.raises(ConfigError, match="importable"):
        LazyCall(Local)()


def test_a_short_path_is_recorded_rather_than_the_place_of_definition() -> None:
    from dufu.config.check import check_config
    from dufu.config.lazy import target_path

    assert target_path(LazyCall) == "dufu.config.LazyCall"
    assert target_path(check_config) == "dufu.config.check.check_config"
    assert target_path(Typed) == "tests.config.targets.Typed"
