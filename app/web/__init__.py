"""The live page: what an operator asks of a deployment, answered from the journal; `tangram web`."""
