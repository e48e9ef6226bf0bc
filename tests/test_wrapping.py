"""Attributes that are another value for a while."""

import pytest

from opensora_accel.wrapping import replaced


class Base:
    @staticmethod
    def told():
        return "told"

    @property
    def number(self):
        return 1


class Derived(Base):
    pass


@pytest.mark.parametrize(("owner", "is_own"), [(Base, True), (Derived, False)])
def test_a_static_method_and_a_property_come_back_as_they_were(owner, is_own):
    before = dict(vars(owner))
    with replaced(owner, "told", lambda: "else"), replaced(owner, "number", property(lambda self: 2)):
        assert owner.told() == "else" and owner().number == 2
    assert dict(vars(owner)) == before and owner.told() == "told" and owner().number == 1
    assert ("told" in vars(owner)) is is_own


def test_it_comes_back_after_an_error_and_in_the_right_order():
    owner = Derived()
    with pytest.raises(KeyError), replaced(owner, "told", 1), replaced(owner, "told", 2):
        assert owner.told == 2
        raise KeyError
    assert vars(owner) == {}
