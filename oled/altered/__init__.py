"""Rules that change a model: routes (`reroute`), experts in two parts (`split`); numpy only."""
