"""How many replicas a model needs: policies and limits as pure arithmetic on readings, with the time passed in."""
