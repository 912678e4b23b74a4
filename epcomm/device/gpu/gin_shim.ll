; What `gin` calls, written over NCCL's device functions, which take structs by value: Triton hands over numbers only.
; A communicator is the address of a device copy of ncclDevComm, a window an ncclWindow_t. All threads of a program call
; these together. They aren't inlined: NCCL's code has each kind of network adapter, and would be there once per call.

target triple = "nvptx64-nvidia-cuda"

%team = type { i32, i32, i32 }
%threads = type { [16 x i8], ptr }
%gin = type { [128 x i8] }

declare void @ncclCoopAnyInitCta(ptr)
declare %team @ncclTeamWorld(ptr)
declare void @ncclGin_C_init(ptr, i32, ptr, i32)
declare void @ncclGinPut_v3(ptr, ptr byval(%team) align 4, i32, ptr, i64, ptr, i64, i64, i32, ptr, i64, i32, i1 zeroext, i32, i64, i1 zeroext, i32, ptr byval(%threads) align 8, i1 zeroext, ptr, i32, i32, i32, i32)
declare void @ncclGinSignal_v3(ptr, ptr byval(%team) align 4, i32, i32, ptr, i64, i32, i1 zeroext, i32, i64, ptr byval(%threads) align 8, i1 zeroext, ptr, i32, i32, i32)
declare void @ncclGinFlush(ptr, ptr byval(%threads) align 8, i32)

; a copy without a signal: signal type none 0; NCCL is told that nothing was released so far but to this thread (10), and
; that the system (0) wants it, although `gin` has released it to the system: what NCCL itself writes comes on top
define i32 @epcomm_gin_put(i64 %comm, i64 %context, i64 %rank, i64 %window, i64 %to, i64 %from, i64 %bytes) noinline {
  %gin = alloca %gin, align 16
  %team = alloca %team, align 4
  %threads = alloca %threads, align 8
  %comm.at = inttoptr i64 %comm to ptr
  %window.at = inttoptr i64 %window to ptr
  %context.id = trunc i64 %context to i32
  %peer = trunc i64 %rank to i32
  call void @ncclGin_C_init(ptr %gin, i32 60, ptr %comm.at, i32 %context.id)
  %world = call %team @ncclTeamWorld(ptr %comm.at)
  store %team %world, ptr %team
  call void @ncclCoopAnyInitCta(ptr %threads)
  call void @ncclGinPut_v3(ptr %gin, ptr byval(%team) align 4 %team, i32 %peer, ptr %window.at, i64 %to, ptr %window.at, i64 %from, i64 %bytes, i32 0, ptr null, i64 0, i32 0, i1 zeroext false, i32 0, i64 0, i1 zeroext false, i32 0, ptr byval(%threads) align 8 %threads, i1 zeroext false, ptr null, i32 10, i32 0, i32 0, i32 0)
  ret i32 0
}

; adds to a word of the peer's segment: signal type VA 1, strong (after all puts of this context to the peer), add 1
define i32 @epcomm_gin_add(i64 %comm, i64 %context, i64 %rank, i64 %window, i64 %offset, i64 %amount) noinline {
  %gin = alloca %gin, align 16
  %team = alloca %team, align 4
  %threads = alloca %threads, align 8
  %comm.at = inttoptr i64 %comm to ptr
  %window.at = inttoptr i64 %window to ptr
  %context.id = trunc i64 %context to i32
  %peer = trunc i64 %rank to i32
  call void @ncclGin_C_init(ptr %gin, i32 60, ptr %comm.at, i32 %context.id)
  %world = call %team @ncclTeamWorld(ptr %comm.at)
  store %team %world, ptr %team
  call void @ncclCoopAnyInitCta(ptr %threads)
  call void @ncclGinSignal_v3(ptr %gin, ptr byval(%team) align 4 %team, i32 %peer, i32 1, ptr %window.at, i64 %offset, i32 0, i1 zeroext true, i32 1, i64 %amount, ptr byval(%threads) align 8 %threads, i1 zeroext false, ptr null, i32 10, i32 1, i32 0)
  ret i32 0
}

; waits until the sources of this context's puts are free; memory order acquire 2
define i32 @epcomm_gin_flush(i64 %comm, i64 %context) noinline {
  %gin = alloca %gin, align 16
  %threads = alloca %threads, align 8
  %comm.at = inttoptr i64 %comm to ptr
  %context.id = trunc i64 %context to i32
  call void @ncclGin_C_init(ptr %gin, i32 60, ptr %comm.at, i32 %context.id)
  call void @ncclCoopAnyInitCta(ptr %threads)
  call void @ncclGinFlush(ptr %gin, ptr byval(%threads) align 8 %threads, i32 2)
  ret i32 0
}
