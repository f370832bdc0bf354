"""What stands in the way of what in a figure."""

import numpy as np
import pytest
from matplotlib.text import Text


def collisions(figure) -> list[tuple]:
    """Texts that leave the figure, and pairs of texts that overlap by more than a pixel."""
    seen, draw = [], Text.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", lambda t, *args: seen.append(t) or draw(t, *args))
        figure.draw_without_rendering()
    seen = [t for t in dict.fromkeys(seen) if t.get_visible() and t.get_text().strip()]
    texts, boxes = [t.get_text() for t in seen], np.array([t.get_window_extent().extents
                                                           for t in seen])
    outside = (boxes[:, :2] < -1) | (boxes[:, 2:] > figure.bbox.extents[2:] + 1)
    a, b = boxes[:, None], boxes[None]
    shared = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    pairs = np.argwhere(np.tril((shared > 1).all(-1), -1))
    return [(texts[i], "is clipped") for i in np.flatnonzero(outside.any(1))] + [
        (texts[i], texts[j]) for i, j in pairs]
