"""What Tocsin stands on: checked by `make audit`, listed by `make sbom`."""
