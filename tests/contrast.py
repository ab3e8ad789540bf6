"""How well one colour can be read on another, as WCAG 2 defines it."""


def luminance(channels):
    """The relative luminance of red, green and blue from 0 to 255."""
    parts = [x / 255 for x in channels]
    parts = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast_ratio(one, other):
    """From 1, for the same colour twice, to 21, for black and white."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)
