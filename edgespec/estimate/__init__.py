"""Estimates of what a pair would do on hardware that need not be here, from sizes and data sheets; loads nothing."""
