/* SPDX-License-Identifier: Apache-2.0 */
/* kernels_image: the image that nvcc made of kernels.cu, linked into this program. */
#ifndef KVD_GPU_KERNELS_IMAGE_H
#define KVD_GPU_KERNELS_IMAGE_H

#include <stddef.h>

/* A fatbin, as cuModuleLoadData takes it; NULL: built without nvcc. */
const void *kernels_image(size_t *bytes_p);
/* "sm_75 sm_90 compute_75": code for these, and PTX; NULL: there is none. */
const char *kernels_image_text(void);

#endif
