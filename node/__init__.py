"""The data plane of one site: model, data, training loop and exchange."""
