"""Hours of churn with real processes, installed as pccl.stress; the library never imports it."""
