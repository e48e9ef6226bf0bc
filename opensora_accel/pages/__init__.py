"""Pages that tools write: templates and charts that become one file, which needs no network."""

from opensora_accel.pages import charts
from opensora_accel.pages.templates import Value, render

__all__ = ["Value", "charts", "render"]
