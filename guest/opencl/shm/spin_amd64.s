#include "textflag.h"

// func Spin(n int)
TEXT ·Spin(SB), NOSPLIT, $0-8
	MOVQ n+0(FP), AX
loop:
	SUBQ $1, AX
	JLT  done
	PAUSE
	JMP  loop
done:
	RET
