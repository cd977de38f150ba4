"""Models that carry the method from the start; importing a file registers its models with timm."""

__all__ = []
