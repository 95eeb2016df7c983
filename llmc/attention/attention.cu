/*
The attention operators on CUDA: their entry points, and the translation unit that compiles all their kernels once for
every program and test. Contract in terms.h.
*/
#ifdef USE_CUDNN
#include "cudnn.cuh"
#endif
#include "cuda_backward.cuh"
#include "cuda_forward.cuh"

static size_t attention_backward_bytes(const AttentionSizes* size) {
    AttentionBackwardTask task;
    memset(&task, 0, sizeof task);
    task.in.size = *size;
    task.in.size.Tq = size->Tk;
    attention_plan_backward(&task, attention_rows(size->HS), NULL);
    return task.bytes;
}

void attention_choose(const char* name, unsigned terms) {
    const bool own = strcmp(name, "own") == 0;
    if (own && terms & (TERM_CAP | TERM_SINK | TERM_MIX)) {
        fatal("%s: the kernels for CUDA have no such term; leave the flag out, or train on the CPU",
              terms & TERM_CAP    ? "--softcap"
              : terms & TERM_SINK ? "--sinks"
                                  : "--position_encoding mix");
    }
    if (own) { attention_check_terms(terms); }
#ifdef USE_CUDNN
    cudnn_attention.on = false;
    if (own) { return; }
    const char* lacks = terms & TERM_SCALE  ? "scale of rows (Scalable-Softmax, --log_scale)"
                        : terms & TERM_CAP  ? "--softcap"
                        : terms & TERM_SINK ? "--sinks"
                        : terms & TERM_MIX  ? "--position_encoding mix"
                        : terms & TERM_KEY  ? "numbers by key (fox, cable)"
                        : terms & TERM_DISTANCE && !(terms & TERM_SLOPES) ? "bias but ALiBi's"
                                                                          : NULL;
    if (lacks) {
        fatal("--attention cudnn: cuDNN has no %s, which these flags ask for; use --attention own, or other flags",
              lacks);
    }
    cudnn_attention.on = true, cudnn_attention.slopes = (terms & TERM_SLOPES) != 0;
#else
    if (own) { return; }
    if (sizeof(floatX) == sizeof(float)) {
        fatal(
            "--attention cudnn: cuDNN's attention has no float32; use --attention own, or build with 'make cuda "
            "USE_CUDNN=1' for bfloat16");
    }
    fatal(
        "--attention cudnn: this program was built without cuDNN; build it with 'make cuda USE_CUDNN=1', or use "
        "--attention own");
#endif
}

size_t attention_workspace(const AttentionSizes* size, bool backward) {
    const size_t forward_bytes = attention_split_bytes(size->Tk, size->HS, attention_rows(size->HS));
    const size_t backward_bytes = backward ? attention_backward_bytes(size) : 0;
    size_t bytes = forward_bytes > backward_bytes ? forward_bytes : backward_bytes;
#ifdef USE_CUDNN
    if (cudnn_attention.on && size->Tq == size->Tk && size->Tq > 1) {
        const size_t cudnn = cudnn_planned_bytes(size, backward);
        bytes = cudnn > bytes ? cudnn : bytes;
    }
#endif
    return bytes;
}

void attention_forward(floatX* out, float* lse, const AttentionInput* in, void* workspace) {
    attention_check(in);
#ifdef USE_CUDNN
    if (lse && attention_is_cudnn(in)) {
        attention_forward_cudnn(out, lse, in, workspace);
        return;
    }
#endif
    AttentionForwardTask task;
    memset(&task, 0, sizeof task);
    task.in = *in;
    task.out = out, task.lse = lse;
    attention_plan_forward(&task, attention_rows(in->size.HS), workspace);
    attention_launch_forward(task);
    if (task.splits > 1) {
        const size_t rows = in->size.B * in->size.NH * in->size.Tq;
        LAUNCH(attention_combine_kernel, dim3((unsigned)ceil_div(rows, 4)), 128, 0, main_stream, task);
        cudaCheck(cudaGetLastError());
    }
}

void attention_backward(const AttentionGradients* gradients, const floatX* dout, const floatX* out, const float* lse,
                        const AttentionInput* in, void* workspace) {
    attention_check(in);
    assert(in->size.Tq == in->size.Tk);
#ifdef USE_CUDNN
    if (attention_is_cudnn(in)) {
        attention_backward_cudnn(gradients, dout, out, lse, in, workspace);
        return;
    }
#endif
    AttentionBackwardTask task;
    memset(&task, 0, sizeof task);
    task.in = *in;
    task.to = *gradients;
    task.dout = dout, task.out = out, task.lse = lse;
    attention_plan_backward(&task, attention_rows(in->size.HS), workspace);
    attention_recompute_softmax(task);
    attention_launch_backward(task);
    if (attention_has(in, TERM_DISTANCE)) {
        LAUNCH(attention_table_kernel, dim3((unsigned)ceil_div(in->size.Tk, 32), (unsigned)in->size.NH), 256, 0,
               main_stream, task);
        cudaCheck(cudaGetLastError());
    }
    if (attention_has(in, TERM_SCALE)) {
        LAUNCH(attention_scale_kernel, dim3((unsigned)in->size.NH), 128, 0, main_stream, task);
        cudaCheck(cudaGetLastError());
    }
}
