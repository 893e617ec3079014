/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/kernels_image.h"

#ifdef KERNELS_FILE
__asm__(".pushsection .rodata, \"a\", %progbits\n"
	".balign 16\n"
	"kernels_image_begin:\n"
	".incbin \"" KERNELS_FILE "\"\n"
	"kernels_image_end:\n"
	".popsection\n");

extern const unsigned char kernels_image_begin[], kernels_image_end[];
#endif

const void *kernels_image(size_t *bytes_p)
{
#ifdef KERNELS_FILE
	*bytes_p = (size_t)(kernels_image_end - kernels_image_begin);
	return kernels_image_begin;
#else
	*bytes_p = 0;
	return NULL;
#endif
}

const char *kernels_image_text(void)
{
#ifdef KERNELS_FILE
	return KERNELS_TEXT;
#else
	return NULL;
#endif
}
