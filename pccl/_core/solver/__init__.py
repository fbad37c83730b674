"""The best ring over measured bandwidths; pure arithmetic."""
