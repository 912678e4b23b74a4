// What `nvshmem` calls, over NVSHMEM's device functions, in MLIR's LLVM dialect: `nvshmem_slice` links and optimises it.
// All threads of a program call these together; what isn't a call of the whole block is done by one thread. They aren't
// inlined: NVSHMEM's code has each kind of network adapter, and would be there once per call.

llvm.func @nvshmemx_putmem_nbi_block(!llvm.ptr, !llvm.ptr, i64, i32)
llvm.func @nvshmemx_signal_op(!llvm.ptr, i64, i32, i32)
llvm.func @nvshmem_fence()
llvm.func @nvshmem_quiet()

llvm.func @epcomm_nvshmem_put(%to: i64, %from: i64, %bytes: i64, %rank: i64) -> i32 attributes {passthrough = ["noinline"]} {
  %to_address = llvm.inttoptr %to : i64 to !llvm.ptr
  %from_address = llvm.inttoptr %from : i64 to !llvm.ptr
  %peer = llvm.trunc %rank : i64 to i32
  llvm.call @nvshmemx_putmem_nbi_block(%to_address, %from_address, %bytes, %peer) : (!llvm.ptr, !llvm.ptr, i64, i32) -> ()
  %nothing = llvm.mlir.constant(0 : i32) : i32
  llvm.return %nothing : i32
}

// the fence puts all earlier puts of this rank before the signal, whichever threads started them
llvm.func @epcomm_nvshmem_raise(%word: i64, %value: i64, %rank: i64) -> i32 attributes {passthrough = ["noinline"]} {
  %zero = llvm.mlir.constant(0 : i32) : i32
  %thread = llvm.call_intrinsic "llvm.nvvm.read.ptx.sreg.tid.x"() : () -> i32
  %is_first = llvm.icmp "eq" %thread, %zero : i32
  llvm.cond_br %is_first, ^first, ^all
^first:
  %set = llvm.mlir.constant(9 : i32) : i32
  %address = llvm.inttoptr %word : i64 to !llvm.ptr
  %peer = llvm.trunc %rank : i64 to i32
  llvm.call @nvshmem_fence() : () -> ()
  llvm.call @nvshmemx_signal_op(%address, %value, %set, %peer) : (!llvm.ptr, i64, i32, i32) -> ()
  llvm.br ^all
^all:
  llvm.return %zero : i32
}

llvm.func @epcomm_nvshmem_quiet() -> i32 attributes {passthrough = ["noinline"]} {
  %zero = llvm.mlir.constant(0 : i32) : i32
  %thread = llvm.call_intrinsic "llvm.nvvm.read.ptx.sreg.tid.x"() : () -> i32
  %is_first = llvm.icmp "eq" %thread, %zero : i32
  llvm.cond_br %is_first, ^first, ^all
^first:
  llvm.call @nvshmem_quiet() : () -> ()
  llvm.br ^all
^all:
  llvm.return %zero : i32
}
