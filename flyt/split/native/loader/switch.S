/* SPDX-License-Identifier: Apache-2.0 */
/* Entry, and the switches between contexts: callee-saved registers on the stack, rsp kept. */
    .text
    .globl _start, context_switch, context_start, context_resume, context_checkpoint, restorer

_start:
    xor %ebp, %ebp
    mov %rsp, %rdi
    and $-16, %rsp
    call loader_main
    ud2

    .macro save_registers
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    sub $8, %rsp
    stmxcsr (%rsp)
    fnstcw 4(%rsp)
    .endm

    .macro restore_registers
    ldmxcsr (%rsp)
    fldcw 4(%rsp)
    add $8, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    .endm

context_switch:                 /* (uint64_t *save, uint64_t to, uint64_t value) */
    save_registers
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    mov %rdx, %rax
    restore_registers
    ret

context_start:                  /* (uint64_t *save, uint64_t stack, uint64_t entry) */
    save_registers
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    mov %rdx, %rax
    xor %edx, %edx              /* no function for the program to register with atexit */
    xor %ebp, %ebp
    xor %ebx, %ebx
    xor %edi, %edi
    xor %esi, %esi
    jmp *%rax

context_resume:                 /* (uint64_t stack, uint64_t value) */
    mov %rdi, %rsp
    mov %rsi, %rax
    restore_registers
    ret

context_checkpoint:             /* (const char *path); 7 words below the return address */
    save_registers
    mov %rsp, %rsi
    call image_write
    restore_registers
    ret

restorer:
    mov $15, %eax               /* rt_sigreturn */
    syscall
    ud2

    .section .note.GNU-stack, "", @progbits
