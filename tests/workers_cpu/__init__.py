"""Tests of CPU environments; a package, so that file names may repeat those of other areas."""
