/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/attend_image.h"

#ifdef ATTEND_FILE
__asm__(".pushsection .rodata, \"a\", %progbits\n"
	".balign 16\n"
	"attend_image_begin:\n"
	".incbin \"" ATTEND_FILE "\"\n"
	"attend_image_end:\n"
	".popsection\n");

extern const unsigned char attend_image_begin[], attend_image_end[];
#endif

const void *attend_image(size_t *bytes_p)
{
#ifdef ATTEND_FILE
	*bytes_p = (size_t)(attend_image_end - attend_image_begin);
	return attend_image_begin;
#else
	*bytes_p = 0;
	return NULL;
#endif
}
