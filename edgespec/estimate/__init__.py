"""What a pair would do on hardware that need not be here. It knows sizes and data sheets, and loads nothing."""
