import pytest

from tests.planner.stand_in import trace_stand_ins


@pytest.fixture
def stand_in_traces(monkeypatch):
    trace_stand_ins(monkeypatch)
