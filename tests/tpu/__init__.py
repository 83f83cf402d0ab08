"""Does every lowering compile for a real TPU?  libtpu holds the compiler, which needs no chip."""
