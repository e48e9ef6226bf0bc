"""Transformers as their authors build them, at toy widths: same names, arguments and order, other code."""
