"""The cache inside other libraries, one package each; none is imported by ``import kvnumba``."""
