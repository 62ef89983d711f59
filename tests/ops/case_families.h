// One line per family of cases.h that has its file in tests/ops/cases.
SLUICE_FAMILY(elementwise)
SLUICE_FAMILY(linear)
SLUICE_FAMILY(cross_entropy)
SLUICE_FAMILY(attention)
