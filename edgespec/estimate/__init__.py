"""What a pair would do on hardware that need not be here. Knows sizes and data sheets, and loads nothing."""
