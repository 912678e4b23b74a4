"""`epcomm explain`: why a collective goes the way it goes, and what it would cost otherwise."""
